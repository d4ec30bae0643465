"""Prefixes that can only be continued from a state: where they end, and what becomes of the state."""

from __future__ import annotations

import hashlib
import random

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import EntryState, Lookup
from lmtier.format.keys import KEY_BYTES, NO_TENANT, is_state, namespace, state_key, tenant_of, value_key
from lmtier.format.layout import PAGE, LayerShape, Layout, Name, form_of, padded
from lmtier.rules.worth import Cost
from lmtier.testing import MemoryTier
from lmtier.tiers.base import Reason
from tests.core.test_cache import LAYOUT, ONE, ROOM, C, cpu, disk, keys, store
from tests.model.hand import HandTier

STATES = Layout((LayerShape(1, 5000, 0),) * 2, "u8", C, C, "state")
STATE = form_of(STATES, (STATES.whole,))
STATE_ROOM = padded(STATES.nbytes(STATES.whole))
FAR = "far://"


def state_of(key: bytes) -> bytes:
    return state_key(key, STATES.to_json())


def content(key: bytes) -> bytes:
    return (hashlib.sha256(b"state" + key).digest() * 400)[: STATE.sizes[0]]


def store_state(cache: Cache, names: list[bytes]) -> bool:
    """Save the state after these chunks, if it is not stored."""
    reservation = cache.reserve([names[-1], state_of(names[-1])], STATE, first=1)
    for key, offsets in reservation.places:
        cache.slab.view(offsets[0], STATE.sizes[0])[:] = content(key)
    cache.commit(reservation)
    return bool(reservation.chunks)


def look(cache: Cache, names: list[bytes]) -> Lookup:
    """The match, ready, whose state has the right bytes."""
    match = cache.wait(cache.match(names, ONE, state_form=STATE))
    is_right(cache, match)
    return match


def is_right(cache: Cache, match: Lookup) -> None:
    assert match.is_ready
    assert (match.state_match is not None) == bool(match.chunks)
    if match.state_match is not None:
        (entry,) = match.state_match.run
        assert entry.key == state_of(match.keys[match.chunks - 1])
        assert bytes(cache.slab.view(entry.offsets[0], STATE.sizes[0])) == content(entry.key)


def found(cache: Cache, names: list[bytes]) -> int:
    match = look(cache, names)
    chunks = match.chunks
    cache.release(match)
    assert cache.flush()  # a match that was cut leaves loads of the rest under way
    cache.check()
    assert not cache.index.leased_bytes
    return chunks


def test_a_states_key_marks_it_and_keeps_its_tenant():
    key = namespace("m") + NO_TENANT + b"h" * 24
    state = state_of(key)
    assert len(state) == KEY_BYTES
    assert state[:8] == key[:8]
    assert is_state(state)
    assert not is_state(key)
    assert not is_state(value_key(b"name"))
    assert state != state_key(key, LAYOUT.to_json())


def test_a_prefix_ends_where_a_state_is_stored(make):
    cache = make(cpu(20))
    names = keys(6)
    store(cache, names)
    assert found(cache, names) == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="no_state") == 6 * C
    store_state(cache, names[:2])
    store_state(cache, names[:5])
    assert found(cache, names) == 5
    assert found(cache, names[:4]) == 2
    assert found(cache, [*names[:4], *keys(2, "b")]) == 2
    assert found(cache, names[:1]) == 0


def test_tokens_without_a_state_are_no_hit(make):
    """States count as no tokens."""
    cache = make(cpu(20))
    names = keys(6)
    store(cache, names)
    store_state(cache, names[:4])
    found(cache, names)
    value = cache.metrics.value
    assert value("lmtier_hit_tokens_total", tier="cpu") == 4 * C
    assert value("lmtier_missed_tokens_total", reason="no_state") == 2 * C
    assert value("lmtier_stored_tokens_total", tier="cpu") == 6 * C
    assert value("lmtier_skipped_tokens_total") == 0
    assert value("lmtier_used_bytes", tier="cpu") == 6 * ROOM + STATE_ROOM


def test_a_state_has_no_tokens_in_any_tier(make, tmp_path):
    cache = make(cpu(20), disk(tmp_path))
    names = keys(2)
    store(cache, names)
    store_state(cache, names)
    cache.flush(10)
    assert cache.lower.owned[0].occupancy().chunks == 3
    for tier in ("cpu", "disk"):
        assert cache.metrics.value("lmtier_stored_tokens_total", tier=tier) == 2 * C


def test_a_state_is_stored_once(make):
    cache = make(cpu(20))
    names = keys(2)
    store(cache, names)
    assert store_state(cache, names)
    assert not store_state(cache, names)


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_state_leaves_before_its_chunk(make, is_asked_for):
    """No chunk leaves before its state."""
    cache = make(f"cpu://?capacity={4 * ROOM + STATE_ROOM}&policy=lru")
    names = keys(4)
    store(cache, names)
    store_state(cache, names)
    if is_asked_for:
        cache.release(look(cache, names))
    store(cache, keys(1, "other"))
    assert all(name in cache.index for name in names[:3])
    assert state_of(names[3]) not in cache.index
    assert found(cache, names) == 0


def test_a_prompt_that_is_in_use_keeps_its_state(make):
    cache = make(f"cpu://?capacity={4 * ROOM + STATE_ROOM}&policy=lru")
    names = keys(4)
    store(cache, names)
    store_state(cache, names)
    match = look(cache, names)
    store(cache, keys(3, "other"))
    is_right(cache, match)
    cache.release(match)


def test_a_reused_state_is_written_with_its_chunks(make, tmp_path):
    names = keys(4)
    tiers = cpu(20), disk(tmp_path, write="reused")
    with make(*tiers) as cache:
        store(cache, names)
        store_state(cache, names)
        assert [found(cache, names) for _ in range(2)] == [4, 4]
        assert cache.flush()
    assert found(make(*tiers), names) == 4


def test_a_state_on_disk_is_as_young_as_its_chunks(make, tmp_path):
    cache = make(f"cpu://?capacity={40 * ROOM}", disk(tmp_path, 8, policy="lru"))
    names = keys(2)
    store(cache, names)
    store_state(cache, names)
    assert cache.flush()
    for number in range(8):
        store(cache, keys(1, f"other {number}"))
        assert found(cache, names) == 2
        assert cache.flush()
    assert cache.lower.owned[0].index.get(state_of(names[1])) is not None


def test_states_of_an_ended_session_leave_with_its_chunks(make):
    cache = make(f"cpu://?capacity={4 * ROOM + 2 * STATE_ROOM}&policy=lru")
    old, new = keys(2, "old"), keys(2, "new")
    for names, session in ((old, "a"), (new, "b")):
        cache.release(cache.wait(cache.match(names, ONE, state_form=STATE, session=session)))
        store(cache, names)
        store_state(cache, names)
    agent = cache.sessions.get(tenant_of(new[0]), "b")
    assert agent is not None
    cache.sessions.end(agent)
    store(cache, keys(STATE_ROOM // ROOM + 1, "other"))
    assert found(cache, old) == 2
    assert not any(key in cache.index for key in (new[1], state_of(new[1])))


def test_a_state_is_no_turn_of_its_session(make):
    cache = make(cpu(20))
    names = keys(2)
    for turn in (names[:1], names):
        found(cache, turn)
        store(cache, turn)
        store_state(cache, turn)
    (agent,) = cache.sessions.book
    assert agent.chain == tuple(names)
    assert agent.requests == 2


def test_chunks_and_states_come_back_from_disk(make, tmp_path):
    names = keys(4)
    with make(cpu(20), disk(tmp_path)) as cache:
        store(cache, names)
        store_state(cache, names[:3])
        assert cache.flush()
    cache = make(cpu(20), disk(tmp_path))
    match = look(cache, names)
    assert match.sources == ["disk"] * 3
    assert match.state_match is not None
    assert match.state_match.sources == ["disk"]
    cache.release(match)
    assert found(cache, names) == 3


def spoilt(make, spoil) -> Cache:
    """After a restart; `spoil` has changed what lies below."""
    objects: dict[Name, bytes] = {}
    cache: Cache = make(cpu(20), FAR, opened={FAR: MemoryTier(objects)})
    names = keys(4)
    store(cache, names)
    store_state(cache, names[:2])
    store_state(cache, names)
    assert cache.flush()
    cache.close()
    spoil(objects, names)
    cache = make(cpu(20), FAR, opened={FAR: MemoryTier(objects)})
    return cache


def flip(data: bytes) -> bytes:
    at = PAGE + 100
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_state_with_a_flipped_byte_is_never_used(make):
    def spoil(objects, names):
        name = Name(state_of(names[3]), STATES.whole)
        objects[name] = flip(objects[name])

    cache = spoilt(make, spoil)
    assert found(cache, keys(4)) == 0
    assert cache.metrics.value("lmtier_missed_tokens_total", reason="corrupt") == 4 * C
    assert found(cache, keys(4)) == 2


def test_a_chunk_with_a_flipped_byte_takes_its_state_along(make):
    def spoil(objects, names):
        name = Name(names[2], LAYOUT.whole)
        objects[name] = flip(objects[name])

    cache = spoilt(make, spoil)
    assert found(cache, keys(4)) == 0
    assert found(cache, keys(4)) == 2


def test_the_state_of_another_prompt_is_never_taken(make):
    cache = make(cpu(20))
    one, other = keys(3, "one"), keys(3, "other")
    store(cache, one)
    store(cache, other)
    store_state(cache, other)
    assert found(cache, one) == 0
    assert found(cache, other) == 3


@pytest.fixture
def tier():
    return HandTier({}, keeps=False)


@pytest.fixture
def asked(tier):
    """A cache over a tier that must be asked, and forgets nothing."""
    config = Config(tiers=("cpu://?capacity=1MiB", FAR), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={FAR: tier}) as cache:
        yield cache
        settle(cache, tier)


def settle(cache: Cache, tier: HandTier) -> None:
    cache.step()
    while tier.waiting:
        tier.finish(0)
        cache.step()


def test_a_use_touches_the_state_while_a_tier_is_asked(tier):
    tiers = (f"cpu://?capacity={6 * ROOM + STATE_ROOM}&policy=lru", FAR)
    with Cache(Config(tiers=tiers, chunk_tokens=C, prefault=False), tiers={FAR: tier}) as cache:
        names = keys(4)
        store(cache, names)
        store_state(cache, names)
        settle(cache, tier)
        store(cache, keys(2, "other"))
        settle(cache, tier)
        match = cache.match([*names, *keys(1, "next")], ONE, state_form=STATE)
        assert match.pending_lookups
        settle(cache, tier)
        cache.wait(match)
        assert match.chunks == 4
        cache.release(match)
        store(cache, keys(2, "new"))
        settle(cache, tier)
        assert state_of(names[3]) in cache.index
        assert not any(key in cache.index for key in keys(2, "other"))


def test_a_chunk_that_leaves_during_a_lookup_harms_no_match(asked, tier):
    names = keys(4)
    store(asked, names)
    store_state(asked, names)
    settle(asked, tier)
    match = asked.match([*names, *keys(1, "next")], ONE, state_form=STATE)
    assert match.pending_lookups
    asked.discard(match.run[0])
    settle(asked, tier)
    asked.wait(match)
    asked.release(match)
    asked.check()


def test_a_tier_is_asked_once_for_chunks_and_states(asked, tier):
    names = keys(3)
    store(asked, names)
    store_state(asked, names[:2])
    settle(asked, tier)
    for entry in asked.index.entries():
        asked.memory.discard(entry.key)
    match = asked.match(names, ONE, state_form=STATE)
    assert match.pending_lookups == len(tier.waiting) == 1
    settle(asked, tier)
    assert (match.chunks, match.is_ready) == (2, False)
    asked.prefetch(match)
    settle(asked, tier)
    is_right(asked, match)
    asked.release(match)
    asked.check()


def test_chunks_in_memory_load_with_a_state_from_below(asked, tier):
    names = keys(3)
    store(asked, names)
    store_state(asked, names)
    settle(asked, tier)
    asked.memory.discard(state_of(names[2]))
    match = asked.match(names, ONE, state_form=STATE)
    assert match.pending_lookups == 1
    settle(asked, tier)
    asked.prefetch(match)
    settle(asked, tier)
    assert match.chunks == 3
    is_right(asked, match)
    asked.release(match)
    asked.check()


@pytest.mark.parametrize("which", [0, 1])
def test_a_match_without_its_state_or_last_chunk_is_empty(asked, tier, which):
    names = keys(3)
    store(asked, names)
    store_state(asked, names)
    settle(asked, tier)
    asked.memory.discard(state_of(names[2]))
    asked.memory.discard(names[2])
    match = asked.match(names, ONE, state_form=STATE)
    settle(asked, tier)
    asked.prefetch(match)
    asked.step()
    assert len(tier.waiting) == 2
    tier.fault = Reason.CORRUPT
    tier.finish(which)
    tier.fault = None
    asked.step()
    assert match.is_ready
    assert match.chunks == 0
    assert match.state_match is None
    settle(asked, tier)
    asked.release(match)
    asked.check()
    assert not asked.index.leased_bytes


def test_a_deadline_during_a_lookup_leaves_what_memory_has(asked, tier):
    names = keys(4)
    store(asked, names)
    store_state(asked, names[:2])
    settle(asked, tier)
    match = asked.match(names, ONE, state_form=STATE, deadline=0.0)
    assert match.pending_lookups
    asked.step()
    assert match.is_ready
    assert (match.chunks, match.cut_reason) == (2, "deadline")
    is_right(asked, match)
    asked.release(match)
    settle(asked, tier)
    asked.check()


@pytest.mark.parametrize(("milliseconds", "chunks"), [(1.1, 3), (0.9, 0)])
def test_what_a_state_takes_to_load_is_weighed_too(make, tmp_path, milliseconds, chunks):
    """Loading three chunks and the state takes 1 ms."""
    cache = make(cpu(20), disk(tmp_path))
    names = keys(3)
    store(cache, names)
    store_state(cache, names)
    assert cache.flush()
    for entry in list(cache.index.entries())[::-1]:
        cache.memory.discard(entry.key)
    cache.lower[0].speed._fit.weights = (0.0, 1e-3 / (3 * ONE.stored_bytes + STATE.stored_bytes))
    cost = Cost(0.0, milliseconds / 1e3 / (3 * C), 0.0, 0.0)
    match = cache.match(names, ONE, tokens=3 * C + 1, cost=cost, state_form=STATE, deadline=60.0)
    assert (match.chunks, match.cut_reason) == (chunks, "" if chunks else "not_worth_it")
    cache.release(match)


def test_a_match_released_in_lookup_or_load_holds_nothing(asked, tier):
    names = keys(3)
    store(asked, names)
    store_state(asked, names)
    settle(asked, tier)
    asked.memory.discard(state_of(names[2]))
    for loads in (False, True):
        match = asked.match(names, ONE, state_form=STATE)
        if loads:
            settle(asked, tier)
            asked.prefetch(match)
        asked.release(match)
        settle(asked, tier)
        assert not asked.index.leased_bytes
        asked.check()
    assert asked.metrics.value("lmtier_hit_tokens_total", tier="cpu") == 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_match_has_its_state_or_nothing(seed):
    """Prompts that share beginnings, in a slab that is too small, over a tier that fails now and then."""
    dice = random.Random(seed)
    tier = HandTier({}, keeps=bool(seed % 2))
    tier.chance = dice.random if seed >= 4 else tier.chance
    policy = ("lru", "auto")[seed % 2]
    config = Config(tiers=(cpu(12, policy=policy), FAR), chunk_tokens=C, prefault=False)
    prompts = [keys(3, "a") + keys(4, f"a{n}") for n in range(3)] + [keys(6, f"b{n}") for n in range(2)]
    held: list[Lookup] = []
    found = 0
    with Cache(config, tiers={FAR: tier}) as cache:
        for _ in range(600):
            names = dice.choice(prompts)[: dice.randrange(1, 8)]
            match dice.randrange(8):
                case 0 | 1:
                    store(cache, names)
                    entry = cache.index.get(names[-1])
                    if entry is not None and entry.state is EntryState.READY:
                        store_state(cache, names)
                case 2 if len(held) < 3:
                    held.append(cache.match(names, ONE, state_form=STATE))
                case 3 if held:
                    cache.prefetch(dice.choice(held))
                case 4 if held:
                    cache.release(held.pop(dice.randrange(len(held))))
                case 5 if tier.waiting:
                    fault = dice.choice((Reason.CORRUPT, Reason.ERROR, Reason.ABSENT))
                    tier.fault = fault if dice.random() < 0.05 else None
                    for _ in range(min(3, len(tier.waiting))):
                        tier.finish(dice.randrange(len(tier.waiting)))
                    tier.fault = None
                case 6 if dice.random() < 0.1 and (entries := cache.index.entries()):
                    cache.discard(dice.choice(entries).key, STATE)
                case _:
                    cache.step()
            for each in held:
                if each.is_ready:
                    is_right(cache, each)
                    found += each.chunks
            cache.check()
        while held:
            cache.release(held.pop())
        settle(cache, tier)
        cache.check()
        assert not cache.index.leased_bytes
    assert found
