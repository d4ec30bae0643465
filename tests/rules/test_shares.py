"""A share is kept for its tenant whatever others do, and used by others while it is not."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.config import Config, load
from lmtier.core.cache import Cache
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.errors import ConfigError, MisuseError
from lmtier.format.keys import NAMESPACE_BYTES, VALUES, Identity, KeyChain, seed, tenant, value_key
from lmtier.format.layout import PAGE, Layout, Name, form_of
from lmtier.rules.policy import POLICIES, make_policy
from lmtier.rules.shares import OTHER, Pool, parse
from lmtier.server.report import Report
from lmtier.tools import views
from tests.core.test_shared import settle
from tests.model.hand import HandTier

C = 4
LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=256, dtype="bf16", block_tokens=C, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
assert FORM.slab_bytes == PAGE
MODEL = Identity(model="m", weights="w")
SALTS = ("a", "b", "c")


def key(salt: str, name: object) -> bytes:
    return b"name" + tenant(salt) + repr(name).encode().ljust(24, b".")


def prompt(salt: str, name: int, chunks: int) -> list[bytes]:
    """The keys of a prompt that is like no other."""
    return KeyChain(seed(MODEL, C, salt=salt), C, [name] * (chunks * C)).keys


def index_of(shares: str, capacity: int = 100, policy: str = "lru") -> Index:
    return Index(capacity, make_policy(policy), shares=parse(shares))


def store(index: Index, salt: str, name: object, nbytes: int = 1) -> list[Entry] | None:
    """As the cache does: room first. Returns who left, None if there was no room."""
    gone: list[Entry] = []
    asker = index.pool(key(salt, name))
    if (short := nbytes - index.free) > 0:
        found = index.evict(short, None, asker, nbytes)
        if found is None:
            return None
        gone = found
    index.add(key(salt, name), FORM, nbytes, EntryState.READY, None)
    return gone


def used(index: Index) -> dict[str, int]:
    assert index.pools is not None
    return {pool.name: pool.used for pool in index.pools}


# ---- the settings


def test_shares_are_written_as_a_table_or_as_text():
    table = parse({"a": 0.3, "b": "20%", "team": {"salt": "s3cret", "share": "0.125"}})
    assert [(each.name, each.salt, each.part) for each in table] == [
        ("a", "a", Fraction(3, 10)),
        ("b", "b", Fraction(1, 5)),
        ("team", "s3cret", Fraction(1, 8)),
    ]
    assert parse("a=0.3 b=20%") == table[:2] == parse(table[:2])
    assert parse("") == parse({}) == ()


def test_a_salt_that_has_a_name_is_shown_nowhere():
    config = Config(shares={"team": {"salt": "s3cret", "share": 0.1}})  # type: ignore[arg-type]
    assert "s3cret" not in f"{config!r} {[str(each) for each in config.shares]}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a=1.3", "like 0.3 or 30%"),
        ("a=-0.1", "like 0.3 or 30%"),
        ("a=lots", "like 0.3 or 30%"),
        ("a=", "like 0.3 or 30%"),
        ({"a": True}, "like 0.3 or 30%"),
        ({"a": None}, "like 0.3 or 30%"),
        ("a=60% b=50%", "together they are 110%"),
        ("a=0.1 a=0.1", "two shares"),
        ({"x": {"salt": "a", "share": 0.1}, "a": 0.1}, "two shares"),
        ("a", "shares: 'a'='': a share is"),
        ("=0.1", "belongs to a salt"),
        ("other=0.1", "use another name"),
        ({"x": {"share": 0.1}}, "as a table is written"),
        ({"x": {"salt": "a", "share": 0.1, "more": 1}}, "as a table is written"),
        (0.3, "write them as a table"),
        (["a=0.3"], "write them as a table"),
    ],
)
def test_what_is_no_share_is_refused_in_one_sentence(given: object, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        Config(shares=given)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_they_can_be_given_like_every_other_setting(tmp_path: Path):
    file = tmp_path / "lmtier.toml"
    file.write_text('[shares]\na = 0.3\nb = "20%"\nteam = {salt = "s3cret", share = 0.1}\n')
    config, origins = load(file, env={})
    assert [str(each) for each in config.shares] == ["a=30%", "b=20%", "team=10%"]
    assert origins["shares"] == str(file)
    assert load(env={"LMTIER_SHARES": "a=30% b=0.2"})[0].shares == config.shares[:2]
    assert load(env={}, overrides={"shares": "a=0.3 b=0.2"})[0].shares == config.shares[:2]


def test_three_thirds_are_all_of_it_and_not_more():
    assert sum(each.part for each in parse({"a": "1/3", "b": "1/3", "c": "1/3"})) == 1
    assert sum(each.part for each in parse({"a": 0.1, "b": 0.2, "c": 0.7})) == 1


# ---- who gives


def test_room_that_nobody_needs_is_anybodys():
    index = index_of("a=30%")
    for i in range(100):
        assert store(index, "b", i) == []
    assert used(index) == {"a": 0, OTHER: 100}
    for i in range(30):
        gone = [entry.key for entry in store(index, "a", i) or ()]
        assert gone == [key("b", i)], "what was lent comes back, the oldest first"
    assert used(index) == {"a": 30, OTHER: 70}


def test_a_flood_drives_out_its_own_first():
    index = index_of("a=30% b=20%")
    for salt, chunks in (("a", 30), ("b", 20), ("", 50)):
        for i in range(chunks):
            store(index, salt, i)
    for salt in ("b", "", "a", "unknown"):
        for i in range(500):
            gone = store(index, salt, (salt, "flood", i)) or []
            assert [index.pool(entry.key) for entry in gone] == [index.pool(key(salt, 0))]
    assert used(index) == {"a": 30, "b": 20, OTHER: 50}


def test_whoever_is_furthest_above_gives():
    index = index_of("a=10% b=40%")
    for salt, chunks in (("a", 20), ("b", 50), ("", 30)):  # 2, 1.25 and 0.6 times their shares
        for i in range(chunks):
            store(index, salt, i)
    for i in range(20):
        store(index, "", ("more", i))
    assert used(index) == {"a": 10, "b": 40, OTHER: 50}


def test_who_is_above_and_all_in_use_lets_the_next_one_give():
    index = index_of("a=10% b=10%")
    for salt, chunks in (("a", 50), ("b", 30), ("", 20)):
        for i in range(chunks):
            store(index, salt, i)
    for entry in index.entries():
        if index.pool(entry.key) is index.pool(key("a", 0)):
            index.lease(entry)
    for i in range(20):
        assert store(index, "", ("more", i)) is not None
    assert used(index) == {"a": 50, "b": 10, OTHER: 40}
    assert index.evict(1, None, index.pool(key("a", 0)), 1) is None, "the rest is within its owners' shares"
    assert store(index, "b", "one") is not None, "but one's own may always go"


def test_nobody_asks_and_only_what_is_above_a_share_leaves():
    """A tier that is smaller after a restart."""
    index = Index(10, make_policy("lru"), shares=parse("a=50%"))
    for salt, chunks in (("a", 8), ("", 12)):
        for i in range(chunks):
            index.adopt(Entry(key(salt, i), FORM, 1, EntryState.READY, i))
    assert len(index.evict(index.used - index.capacity) or ()) == 10
    assert used(index) == {"a": 5, OTHER: 5}


def test_a_smaller_place_takes_from_the_fullest_if_it_must():
    index = index_of("a=10%")
    for salt in ("a", ""):
        for i in range(50):
            store(index, salt, i)
    for entry in index.entries():
        if index.pool(entry.key) is index.pool(key("a", 0)):
            index.lease(entry)
    assert len(index.evict(10) or ()) == 10
    assert used(index) == {"a": 50, OTHER: 40}


def test_a_share_of_nothing_is_the_first_to_give():
    index = index_of("batch=0")
    for i in range(50):
        store(index, "batch", i)
    for i in range(100):
        store(index, "", i)
    assert used(index) == {"batch": 0, OTHER: 100}
    assert len(store(index, "batch", "again") or ()) == 0 == used(index)["batch"]


def test_named_values_are_everybody_elses():
    index = index_of("a=50%")
    looks_like_a = VALUES + tenant("a") + bytes(24)
    assert index.pool(value_key(b"x")) is index.pool(looks_like_a) is not index.pool(key("a", 0))
    assert index.pool(key("unknown", 0)) is index.pool(key("", 0)) is index.pool(looks_like_a)


def test_a_name_changes_within_a_pool_only():
    index = index_of("a=50%")
    entry = index.add(key("a", 0), FORM, 1, EntryState.READY, None)
    index.rekey(entry, key("a", 1))
    with pytest.raises(MisuseError):
        index.rekey(entry, key("b", 1))


# ---- against a plain model


class Model:
    """One list of everything, the oldest first, and the rule in the plainest words."""

    def __init__(self, capacity: int, rooms: dict[str, int]) -> None:
        self.capacity = capacity
        self.rooms = rooms
        self.held: list[tuple[str, int, int]] = []
        """Whose, number, bytes."""
        self.leased: set[int] = set()

    def used(self, whose: str) -> int:
        return sum(nbytes for owner, _, nbytes in self.held if owner == whose)

    def store(self, whose: str, number: int, nbytes: int) -> list[int] | None:
        before, gone = list(self.held), []
        while self.capacity - sum(each[2] for each in self.held) < nbytes:
            wanted = {pool: self.used(pool) + nbytes * (pool == whose) for pool in self.rooms}
            by_excess = sorted(
                self.rooms,
                key=lambda pool: (wanted[pool] / (self.rooms[pool] or 1e-300), wanted[pool]),
                reverse=True,
            )
            above = [pool for pool in by_excess if wanted[pool] > self.rooms[pool]]
            can = (
                each
                for pool in [*above, whose]
                for each in self.held
                if each[0] == pool and each[1] not in self.leased
            )
            if (victim := next(can, None)) is None:
                self.held = before
                return None
            assert victim[0] == whose or self.used(victim[0]) > self.rooms[victim[0]]
            self.held.remove(victim)
            gone.append(victim[1])
        self.held.append((whose, number, nbytes))
        return gone


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    spare=st.integers(0, 4),
    capacity=st.integers(3, 60),
    largest=st.sampled_from((1, 1, 3)),
    chance=st.integers(0, 1 << 32).map(random.Random),
)
def test_it_equals_a_plain_model(weights, spare, capacity, largest, chance):
    parts = {salt: Fraction(w, sum(weights) + spare or 1) for salt, w in zip(SALTS, weights, strict=False)}
    index = Index(capacity, make_policy("lru"), shares=parse(parts))
    assert index.pools is not None
    model = Model(capacity, {pool.name: pool.share_bytes for pool in index.pools})
    assert sum(model.rooms.values()) == capacity
    entries: dict[int, Entry] = {}
    for number in range(250):
        whose = chance.choice([*parts, OTHER])
        nbytes = chance.randint(1, largest)
        expected = model.store(whose, number, nbytes)
        gone = store(index, "x" if whose == OTHER else whose, number, nbytes)
        assert (gone is None) == (expected is None)
        if gone is not None and expected is not None:
            assert [entry.key for entry in gone] == [entries.pop(each).key for each in expected]
            entry = index.get(key("x" if whose == OTHER else whose, number))
            assert entry is not None
            entries[number] = entry
        if entries and chance.random() < 0.4:
            some = chance.choice(sorted(entries))
            if chance.random() < 0.5:
                index.touch([entries[some]])
                found = next(each for each in model.held if each[1] == some)
                model.held.remove(found)
                model.held.append(found)
            elif some in model.leased:
                model.leased.remove(some)
                index.release(entries[some])
            elif len(model.leased) < 6:
                model.leased.add(some)
                index.lease(entries[some])
        assert used(index) == {pool: model.used(pool) for pool in model.rooms}
        index.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=25, deadline=None)
@given(
    part=st.integers(0, 10), capacity=st.integers(5, 40), chance=st.integers(0, 1 << 32).map(random.Random)
)
def test_what_is_within_a_share_outlives_any_flood(policy, part, capacity, chance):
    """And whoever wants it back gets it, to the chunk. Under every policy, with chains."""
    index = Index(capacity, make_policy(policy), shares=parse({"a": Fraction(part, 10)}))
    room = capacity * part // 10

    def grow(salt: str, name: object, length: int) -> list[Entry]:
        run: list[Entry] = []
        for i in range(length):
            if index.free < 1:
                keep = run[-1] if run else None
                if index.evict(1, keep, index.pool(key(salt, 0)), 1) is None:
                    break
            run.append(index.add(key(salt, (name, i)), FORM, 1, EntryState.READY, run[-1] if run else None))
            index.refresh(run)
        return run

    for flood in range(chance.randrange(4)):
        grow("", ("before", flood), chance.randrange(1, 20))
    mine = grow("a", "mine", room)
    assert len(mine) == room, "its share is there for it"
    for flood in range(30):
        run = grow(chance.choice(("", "b")), flood, chance.randrange(1, 12))
        if chance.random() < 0.5:
            index.touch(run)
        index.check()
        assert index.used <= capacity
    assert all(entry.state is EntryState.READY for entry in mine)


# ---- what it costs


def test_without_shares_there_is_one_policy_and_no_pool():
    index = Index(100, make_policy("auto"))
    assert index.pools is None
    assert index.pool(key("a", 0)) is None


def test_nobody_walks_through_what_others_keep_or_use():
    index = index_of("a=50% b=30%", capacity=10_000)
    for salt, chunks in (("a", 5_000), ("b", 3_000), ("", 2_000)):
        for i in range(chunks):
            store(index, salt, i)
    for entry in index.entries():
        if index.pool(entry.key) is index.pool(key("b", 0)):
            index.lease(entry)
    seen: list[str] = []
    assert index.pools is not None

    def watch(pool: Pool) -> None:
        real = pool.policy.order

        def order():
            for entry in real():
                seen.append(pool.name)
                yield entry

        pool.policy.order = order  # type: ignore[method-assign]

    for pool in index.pools:
        watch(pool)
    assert index.evict(1, None, index.pool(key("b", 0)), 1) is None
    assert seen == []
    assert len(index.evict(2, None, index.pool(key("x", 0)), 2) or ()) == 2
    assert seen == [OTHER, OTHER]


# ---- in a cache


def save(cache: Cache, keys: list[bytes]) -> int:
    reservation = cache.reserve(keys, FORM)
    if reservation.chunks:
        cache.commit(reservation)
    return len(keys) - reservation.dropped


def found(cache: Cache, keys: list[bytes]) -> int:
    match = cache.match(keys, FORM)
    cache.wait(match)
    chunks = match.chunks
    cache.release(match)
    return chunks


def open_cache(*tiers: str, capacity: int = 20, shares: str = "a=50%") -> Cache:
    urls = (f"cpu://?capacity={capacity * PAGE}", *tiers)
    return Cache(Config(tiers=urls, chunk_tokens=C, prefault=False, shares=parse(shares)))


def test_a_cache_counts_and_shows_each_share():
    with open_cache(shares="a=25% b=25%") as cache:
        for name in range(10):
            save(cache, prompt("a", name, 2))
        save(cache, prompt("b", 100, 5))
        report = Report(cache, list, started=0.0)
        shares = report.snapshot()["tiers"][0]["shares"]
        assert shares["a"] == {"used": 15 * PAGE, "share": 5 * PAGE, "evicted": 5}
        assert "300 %" in views.stats(report.view(5.0, 1, []), "here")
        value = cache.metrics.value
        shown = {
            name: [value(f"lmtier_share_{what}", tier="cpu", tenant=name) for what in ("bytes", "used_bytes")]
            for name in ("a", "b", OTHER)
        }
        assert shown == {"a": [5 * PAGE, 15 * PAGE], "b": [5 * PAGE, 5 * PAGE], OTHER: [10 * PAGE, 0]}
        assert value("lmtier_share_evictions_total", tier="cpu", tenant="a") == 5
        assert value("lmtier_share_evictions_total", tier="cpu", tenant="b") == 0
        assert value("lmtier_evictions_total", tier="cpu", cause="capacity_unwritten") == 0
        cache.check()


def test_a_long_prompt_takes_its_share_back_and_no_more():
    with open_cache() as cache:
        for name in range(10):
            save(cache, prompt("", name, 2))
        match = cache.match(held := prompt("", 9, 2), FORM)
        assert save(cache, prompt("a", 1, 12)) == 10
        assert cache.metrics.value("lmtier_dropped_tokens_total", tier="cpu", reason="no_room") == 2 * C
        assert found(cache, held) == 2
        cache.release(match)
        assert save(cache, prompt("", 50, 4)) == 4
        assert used(cache.index) == {"a": 10 * PAGE, OTHER: 10 * PAGE}
        cache.check()


def test_a_disk_knows_its_shares_after_a_restart(tmp_path: Path):
    disk = f"disk://{tmp_path}/kv?capacity={20 * 2 * PAGE}"
    mine = prompt("a", 1, 10)
    with open_cache(disk, capacity=24) as cache:
        save(cache, mine)
        cache.flush()
        for name in range(30):
            save(cache, prompt("", 100 + name, 3))
            cache.flush()
        below = cache.lower.owned[0].index
        assert used(below) == {"a": 10 * 2 * PAGE, OTHER: 10 * 2 * PAGE}
    with open_cache(disk, capacity=24) as cache:
        below = cache.lower.owned[0].index
        assert used(below) == {"a": 10 * 2 * PAGE, OTHER: 10 * 2 * PAGE}
        for name in range(30):
            save(cache, prompt("", 200 + name, 3))
            cache.flush()
        assert used(below) == {"a": 10 * 2 * PAGE, OTHER: 10 * 2 * PAGE}
        assert all(each in below for each in prompt("", 229, 3)), "the latest of what floods is there"
        assert found(cache, mine) == 10
        cache.check()


def test_a_smaller_disk_with_large_pins_shrinks_at_start():
    kept: dict[Name, bytes] = {}
    mine, theirs = prompt("a", 1, 6), prompt("", 2, 10)
    for chunks in (16, 12):
        url, tier = f"near://?capacity={chunks * 2 * PAGE}", HandTier(kept, keeps=True, scans_at_once=False)
        config = Config(
            tiers=(f"cpu://?capacity={40 * PAGE}", url),
            chunk_tokens=C,
            prefault=False,
            shares=parse("a=10%"),
        )
        with Cache(config, tiers={url: tier}, wait_until_warm=False) as cache:
            cache.pin("system", mine)
            settle(cache, tier)
            if not kept:
                save(cache, mine)
                save(cache, theirs)
                settle(cache, tier)
            cache.check()
    assert len(kept) == 12
    assert {name.key for name in kept} >= {*mine}


def test_write_evicted_knows_whose_chunks_leave_next(tmp_path: Path):
    """Who asks decides who leaves: it must be on the disk before."""
    disk = f"disk://{tmp_path}/kv?capacity=64MiB&write=evicted"
    with open_cache(disk, capacity=60, shares="a=50%") as cache:
        for name in range(10):
            save(cache, prompt("a", name, 3))
            save(cache, prompt("", 100 + name, 3))
            assert cache.flush()
        for name in range(10, 40):
            save(cache, prompt("a", name, 3))
            assert cache.flush()
        assert used(cache.index) == {"a": 30 * PAGE, OTHER: 30 * PAGE}
        value = cache.metrics.value
        assert value("lmtier_evictions_total", tier="cpu", cause="capacity") == 90
        assert value("lmtier_evictions_total", tier="cpu", cause="capacity_unwritten") == 0


def test_what_an_older_format_left_on_a_disk_makes_room(tmp_path: Path):
    """Its keys had hash where the tenant is now: it counts as everybody else's, and goes."""
    disk = f"disk://{tmp_path}/kv?capacity={20 * 2 * PAGE}"
    old = [each[:NAMESPACE_BYTES] + bytes([i]) * 28 for i, each in enumerate(prompt("a", 1, 20), 1)]
    with open_cache(disk, shares="") as cache:
        save(cache, old)
        cache.flush()
    with open_cache(disk, shares="a=25%") as cache:
        below = cache.lower.owned[0].index
        assert used(below) == {"a": 0, OTHER: 20 * 2 * PAGE}
        save(cache, prompt("a", 1, 10))
        assert not cache.flush(), "half of it found no room"
        assert used(below) == {"a": 5 * 2 * PAGE, OTHER: 15 * 2 * PAGE}
