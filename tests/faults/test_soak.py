"""After a hundred thousand of anything, all room comes back, and every token was counted where it was."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.core.match import EntryState, Lookup
from lmtier.format.layout import PAGE, ChunkForm, Layout, Shard, form_of
from lmtier_backends.disk import DiskTier

EVENTS = 100_000
BUDGET = 60.0
"""Seconds of computing for one soak on a slow machine. A laptop of 2024 takes less than a third of it."""
C = 4


def make_form(layers: int, *heads: tuple[int, int]) -> ChunkForm:
    """A page per layer and head."""
    layout = Layout.uniform(
        layers=layers, heads=2, head_dim=256, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
    )
    return form_of(layout, [Shard(0, layers, low, high) for low, high in heads])


FORMS = [make_form(1, (0, 2)), make_form(3, (0, 2)), make_form(3, (0, 1), (1, 2)), make_form(8, (0, 2))]


def chain(form: int, name: int, length: int) -> list[bytes]:
    """Chains of one form share their first three chunks in pairs."""
    roots = (name if i >= 3 else name // 2 for i in range(length))
    return [hashlib.sha256(f"{form}/{root}/{i}".encode()).digest() for i, root in enumerate(roots)]


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_after_any_history_all_room_comes_back(policy):
    chance = random.Random(39)
    chains = {(form, name): chain(form, name, 8) for form in range(len(FORMS)) for name in range(12)}
    config = Config(tiers=[f"cpu://?capacity={120 * PAGE}&policy={policy}"], chunk_tokens=C, prefault=False)
    matches: list[Lookup] = []
    saves: list[tuple[Grant, list[Shard]]] = []
    began = time.process_time()
    with Cache(config) as cache:
        for event in range(EVENTS):
            form = chance.randrange(len(FORMS))
            names = chains[form, chance.randrange(12)][: chance.randint(0, 8)]
            action = chance.random()
            if action < 0.3 and len(saves) < 4:
                reservation = cache.reserve(names, FORMS[form], first=chance.choice((0, 0, 0, 2)))
                if reservation.chunks:
                    saves.append((reservation, list(FORMS[form].shards)))
            elif action < 0.55 and saves:
                reservation, left = saves[which := chance.randrange(len(saves))]
                end = cache.abort if chance.random() < 0.25 else cache.commit
                end(reservation, left.pop())
                if not left:
                    del saves[which]
            elif action < 0.8 and len(matches) < 6:
                matches.append(cache.match(names, FORMS[form]))
            elif action < 0.98 and matches:
                match = matches.pop(chance.randrange(len(matches)))
                for _ in range(chance.randint(1, 2)):
                    cache.release(match)
            elif matches and (run := matches[-1].run):
                entry = run[-1]
                if entry.state is EntryState.READY:
                    cache.discard(entry.key, entry.form)
            elif event % 50 == 0:
                cache.clear(force=chance.random() < 0.3)
            if event % 1000 == 0:
                cache.check()
        assert cache.metrics.value("lmtier_evictions_total", tier="cpu", cause="capacity") > 1000
        for match in matches:
            cache.release(match)
        for reservation, left in saves:
            for shard in left:
                cache.abort(reservation, shard)
        cache.check()
        assert cache.index.leased_bytes == 0
        cache.clear()
        assert cache.slab.used == cache.index.used == cache.index.leased_bytes == 0
        assert cache.slab.allocate([cache.slab.capacity]) == (0,), "and in one piece"
    print(f"{EVENTS} events in {time.process_time() - began:.1f} s of {BUDGET:.0f}")
    assert time.process_time() - began < BUDGET


def test_every_hit_is_counted_for_the_tier_that_had_it(tmp_path: Path):
    """The oracle: a chunk that the disk was asked to read was there, any other that was found was not.

    Everything that was ever stored is on disk, so the longest stored prefix is what must be found; the
    slab holds a part of it, by a policy of which the oracle knows nothing.
    """

    class Watched(DiskTier):
        def read(self, item, buffers):
            reads.append(item.name.key)  # append is atomic
            return super().read(item, buffers)

    reads: list[bytes] = []
    form, chance = FORMS[0], random.Random(56)
    url = f"disk://{tmp_path}/kv?capacity=1GiB"
    tiers = [f"cpu://?capacity={250 * form.slab_bytes}", url]
    config = Config(tiers=tiers, chunk_tokens=C, load_deadline=60, prefault=False)
    chains = [chain(0, name, 20) for name in range(100)]
    popular = [1 / (1 + name) ** 2.5 for name in range(len(chains))]
    stored: set[bytes] = set()
    asked = hit = from_disk = 0
    began = time.process_time()
    with Cache(config, tiers={url: Watched(tmp_path / "kv")}) as cache:
        value = cache.metrics.value

        def agrees() -> bool:
            hits = [value("lmtier_hit_tokens_total", tier=tier) for tier in ("cpu", "disk")]
            return (
                hits == [(hit - from_disk) * C, from_disk * C] and value("lmtier_asked_tokens_total") == asked
            )

        for event in range(EVENTS):
            names = chance.choices(chains, popular)[0][: chance.randint(1, 20)]
            tail = chance.randrange(C)
            expected = next((i for i, key in enumerate(names) if key not in stored), len(names))
            reads.clear()
            match = cache.match(names, form, tokens=len(names) * C + tail)
            if not match.is_ready:
                cache.wait(match)
            assert match.chunks == expected
            assert {key for key, tier in zip(names, match.sources, strict=False) if tier == "disk"} == set(
                reads
            )
            cache.release(match)
            asked += len(names) * C + tail
            hit += expected
            from_disk += len(reads)
            if expected < len(names) and chance.random() < 0.5:
                cache.commit(cache.reserve(names, form))
                stored.update(names)
                assert cache.flush()
            if event % 1000 == 0:
                assert agrees()
                cache.check()
        assert agrees()
        missed = [
            sample.value
            for metric in cache.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "lmtier_missed_tokens_total"
        ]
        assert sum(missed) + hit * C == asked
        assert value("lmtier_lookups_total") == EVENTS
        assert min(hit - from_disk, from_disk, sum(missed)) > 1000, "each of them was put to the test"
        assert value("lmtier_dropped_tokens_total", tier="disk", reason="evicted_before_write") == 0
    seconds = time.process_time() - began
    print(f"{EVENTS} events in {seconds:.1f} s of {BUDGET:.0f}: {from_disk} of {hit} hits on disk")
    assert seconds < BUDGET
