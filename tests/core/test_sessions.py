"""Sessions in a cache: who ended leaves first, who waits long leaves early, parents outlive children."""

from __future__ import annotations

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import MisuseError
from lmtier.format.keys import NO_TENANT, tenant
from lmtier.rules.policy import POLICIES
from lmtier.rules.session_policy import ReturnTimes
from lmtier.tiers.base import Tier
from tests.core.test_pinning import ONE, ROOM, C, Time, keys


def named(count: int, name: str, salt: str = "") -> list[bytes]:
    """Keys of a tenant's requests."""
    return [b"test" + tenant(salt) + key[8:] for key in keys(count, name)]


def ask(cache: Cache, names: list[bytes], session: str = "", parent: str = "") -> int:
    """A request that loads and stores. Returns how many of its chunks were in the slab."""
    match = cache.match(names, ONE, session=session, parent=parent)
    found = match.chunks
    cache.release(match)
    reservation = cache.reserve(names, ONE)
    cache.commit(reservation)
    cache.step()
    cache.check()
    return found


def there(cache: Cache, names: list[bytes]) -> int:
    return sum(key in cache.index for key in names)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make(time):
    caches: list[Cache] = []

    def make(*tiers: str, opened: dict[str, Tier] | None = None, **settings) -> Cache:
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False, **{"load_deadline": 30.0, **settings})
        caches.append(Cache(config, clock=time, tiers=opened))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


@pytest.fixture(params=sorted(POLICIES))
def cache(request, make):
    return make(f"cpu://?capacity={12 * ROOM}&policy={request.param}")


def end(cache: Cache, session: str) -> None:
    agent = cache.sessions.get(NO_TENANT, session)
    assert agent is not None
    cache.sessions.end(agent)
    cache.check()


def wait(cache: Cache, session: str) -> None:
    agent = cache.sessions.get(NO_TENANT, session)
    assert agent is not None
    cache.sessions.wait_for_person(agent)
    cache.check()


def test_chunks_of_an_ended_session_leave_first(cache):
    old, ended = named(4, "old"), named(4, "ended")
    ask(cache, old, "one")
    ask(cache, old, "one")
    ask(cache, ended, "two")
    ask(cache, ended, "two")
    end(cache, "two")
    ask(cache, named(8, "new"), "three")
    assert (there(cache, old), there(cache, ended)) == (4, 0)


def test_what_another_session_needs_stays_when_one_ends(cache):
    system = named(3, "system")
    one, two = system + named(4, "one"), system + named(3, "two")
    ask(cache, one, "one")
    ask(cache, two, "two")
    end(cache, "one")
    ask(cache, named(5, "new"), "three")
    assert there(cache, two) == 6
    assert there(cache, one[3:]) < 4


def come_back_after(cache: Cache, seconds: float) -> None:
    """That is what sessions do."""
    for _ in range(ReturnTimes.ENOUGH):
        cache.sessions.returns.add(seconds)


def test_who_waits_long_leaves_before_who_works(cache, time):
    come_back_after(cache, 60)
    for name in ("one", "two", "three"):
        ask(cache, named(4, name), name)
    wait(cache, "one")
    time.pass_by(5)
    wait(cache, "two")
    time.pass_by(1)
    ask(cache, named(4, "new"), "four")
    assert [there(cache, named(4, name)) for name in ("one", "two", "three")] == [4, 0, 4]
    assert ask(cache, named(4, "one"), "one") == 4
    time.pass_by(1)
    ask(cache, named(2, "newer"), "five")
    assert there(cache, named(4, "one")) == 4  # it works again


def test_who_comes_back_soon_does_not_leave_early(cache, time):
    """A hint never costs hits: the wait is shorter than the time since others asked."""
    come_back_after(cache, 5)
    for name in ("one", "two", "three"):
        ask(cache, named(4, name), name)
        time.pass_by(30)
    ask(cache, named(4, "two"), "two")
    wait(cache, "two")
    time.pass_by(1)
    ask(cache, named(4, "new"), "four")
    assert there(cache, named(4, "two")) == 4


def test_how_long_a_wait_takes_is_learned_from_returns(cache, time):
    for _ in range(ReturnTimes.ENOUGH):
        ask(cache, named(2, "one"), "one")
        wait(cache, "one")
        time.pass_by(50)
    ask(cache, named(2, "one"), "one")
    assert cache.sessions.returns.expected(0) == pytest.approx(50)


def test_a_repeated_hint_does_not_begin_a_wait_again(cache, time):
    for _ in range(ReturnTimes.ENOUGH):
        ask(cache, named(2, "one"), "one")
        wait(cache, "one")
        time.pass_by(45)
        wait(cache, "one")  # an agent says it, and then its router
        time.pass_by(5)
    ask(cache, named(2, "one"), "one")
    assert cache.sessions.returns.expected(0) == pytest.approx(50)


def test_a_request_of_a_session_that_ended_begins_a_new_one(cache):
    ask(cache, named(4, "one"), "one")
    end(cache, "one")
    assert cache.sessions.get(NO_TENANT, "one") is None
    assert ask(cache, named(4, "one"), "one") == 4
    assert cache.sessions.get(NO_TENANT, "one").requests == 1
    ask(cache, named(8, "other"), "two")
    ask(cache, named(2, "more"), "three")
    assert there(cache, named(4, "one") + named(8, "other")) == 10


def test_a_branch_is_kept_while_children_live(make):
    cache = make(f"cpu://?capacity={12 * ROOM}&policy=lru")
    parent = named(4, "parent")
    ask(cache, parent, "parent")
    child = [*parent[:2], *named(2, "child")]
    ask(cache, child, "child", "parent")
    end(cache, "parent")  # too early: its child is alive
    for turn in range(4):
        ask(cache, named(4, f"flood{turn}"))
        ask(cache, child, "child", "parent")
    assert there(cache, parent) == 4  # older than all that came, but kept young by its child
    end(cache, "child")
    assert cache.sessions.get(NO_TENANT, "parent") is None
    ask(cache, named(6, "new"))
    assert there(cache, parent) == 0


def test_a_child_that_is_forgotten_is_over(make):
    """Else its parent's end would never take effect."""
    cache = make(f"cpu://?capacity={12 * ROOM}&policy=lru")
    cache.sessions.book._max_sessions = 2
    ask(cache, named(4, "parent"), "parent")
    ask(cache, named(4, "child"), "child", "parent")
    end(cache, "parent")
    assert cache.sessions.get(NO_TENANT, "parent") is not None
    ask(cache, named(4, "other"), "other")
    assert cache.sessions.get(NO_TENANT, "child") is None
    assert cache.sessions.get(NO_TENANT, "parent") is None
    ask(cache, named(4, "new"), "other")
    assert [there(cache, named(4, name)) for name in ("parent", "child", "other")] == [0, 4, 4]


def test_generated_chunks_belong_to_the_session_too(cache):
    prompt = named(4, "one")
    match = cache.match(prompt, ONE, session="one")
    cache.release(match)
    cache.commit(cache.reserve([*prompt, *named(2, "answer")], ONE))
    ask(cache, named(6, "two"), "two")
    end(cache, "one")
    ask(cache, named(6, "three"), "three")
    assert there(cache, [*prompt, *named(2, "answer")]) == 0
    assert there(cache, named(6, "two")) == 6


def test_hits_are_counted_for_the_session(cache):
    ask(cache, named(4, "one"), "one")
    ask(cache, named(4, "one"), "one")
    (agent,) = cache.sessions.recent(5)
    now = cache.sessions.now(agent)
    assert (now["requests"], now["tokens"], now["asked"], now["saved"]) == (2, 4 * C, 8 * C, 4 * C)
    assert cache.sessions.kept(agent) == {"cpu": 4 * C}


def test_a_tenants_session_takes_no_room_of_anothers_share(make):
    cache = make(f"cpu://?capacity={8 * ROOM}&policy=lru", shares="a=50%")
    mine = named(4, "mine", "a")
    ask(cache, mine, "agent")
    cache.sessions.end(cache.sessions.get(tenant("a"), "agent"))
    for turn in range(3):
        ask(cache, named(4, f"flood{turn}"))
    assert there(cache, mine) == 4  # over, but within its share


def test_a_prompt_that_is_refused_belongs_to_no_session(cache):
    with pytest.raises(MisuseError, match="occurs twice"):
        cache.match([*named(2, "a"), *named(1, "a")], ONE)
    assert len(cache.sessions.book) == 0
    cache.check()
