"""A follower hears of everything that happens in a cache, in its order, and pays for nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import ChunkForm, form_of
from lmtier.observe.follower import CacheObserver, CacheObservers, SettledLookup
from lmtier.testing import MemoryTier, opaque_layout

LAYOUT = opaque_layout(4096)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
C = LAYOUT.chunk_tokens
KEYS = [b"name" + number.to_bytes(28, "big") for number in range(10)]


class Shared(MemoryTier):
    keeps = False


class Heard(CacheObserver):
    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def asked(self, keys: Sequence[bytes], tokens: int, form: ChunkForm) -> None:
        self.said.append(("asked", [*keys], tokens))

    def settled(self, lookup: SettledLookup, missed: dict[str, int]) -> None:
        self.said.append(("settled", lookup.sources[:], missed))

    def used(self, keys: Sequence[bytes]) -> None:
        self.said.append(("used", [*keys]))

    def changed(self, tier: str, came: bool, keys: Collection[bytes], why: str) -> None:
        self.said.append((tier, came, [*keys], why))

    def changed_elsewhere(self, tier: str, came: bool, keys: Collection[bytes]) -> None:
        self.said.append((tier, came, [*keys]))

    def not_stored(self, tier: str, keys: Collection[bytes], why: str) -> None:
        self.said.append(("not stored", tier, [*keys], why))

    def news(self) -> list[tuple[Any, ...]]:
        said, self.said = self.said, []
        return said


class Steps(CacheObserver):
    steps = 0

    def stepped(self) -> None:
        self.steps += 1


def test_only_what_a_follower_overrides_is_called():
    followers, steps = CacheObservers(), Steps()
    followers.add(steps)
    assert [event for event, heard in vars(followers).items() if heard] == ["stepped"]
    followers.add(steps)
    for hear in followers.stepped:
        hear()
    assert steps.steps == 2
    followers.add(CacheObserver())
    assert len(followers.stepped) == 2


def test_every_event_has_its_place_among_followers():
    events = [name for name, value in vars(CacheObserver).items() if callable(value)]
    assert events == list(vars(CacheObservers()))


def test_a_follower_hears_all_that_happens_in_a_cache():
    urls = ["near://?capacity=1MiB", "far://"]
    config = Config(
        tiers=[f"cpu://?capacity={4 * FORM.slab_bytes}&policy=lru", *urls], chunk_tokens=C, prefault=False
    )
    heard, steps = Heard(), Steps()
    with Cache(config, tiers=dict(zip(urls, (MemoryTier(), Shared()), strict=True))) as cache:
        cache.followers.add(heard)
        cache.followers.add(steps)
        cache.commit(cache.reserve(KEYS[:2], FORM))
        assert heard.news() == [("cpu", True, [*KEYS[:2]], "")]
        assert cache.flush()
        assert sorted(heard.news()) == sorted(
            each for key in KEYS[:2] for each in (("near", True, [key], ""), ("far", True, [key]))
        )
        cache.release(cache.match(KEYS[:3], FORM, tokens=3 * C + 1))
        assert sorted(heard.news()) == [
            ("asked", KEYS[:3], 3 * C + 1),
            ("settled", ["cpu"] * 2, {"never_stored": C, "partial_chunk": 1}),
        ]
        cache.touch(KEYS[:2])
        assert heard.news() == [("used", KEYS[:2])]
        cache.abort(cache.reserve(KEYS[5:6], FORM))
        assert heard.news() == [("cpu", False, [], "deleted"), ("not stored", "cpu", KEYS[5:6], "aborted")]
        cache.commit(cache.reserve(KEYS[6:10], FORM))
        assert [each for each in heard.news() if not each[1]] == [
            ("cpu", False, [KEYS[1], KEYS[0]], "evicted")
        ]
        assert cache.flush()
        heard.news()
        entry = cache.index.get(KEYS[9])
        assert entry is not None
        cache.discard(entry.key, entry.form)
        assert heard.news() == [
            *(("cpu", False, KEYS[9:], "differed"), ("near", False, KEYS[9:], "differed")),
            ("far", False, KEYS[9:]),
        ]
        assert steps.steps > 0
