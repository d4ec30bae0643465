"""Hints, sessions, pins and shares in any order, beside a simple model of who lives and what must stay."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.keys import tenant
from lmtier.rules import hints
from lmtier.rules.hints import DONE, REFUSED, REPEATED, actions_of, envelope
from lmtier.rules.policy import POLICIES
from lmtier.rules.shares import parse
from lmtier.testing import MemoryTier
from tests.core.test_pinning import AT_REST, ONE, ROOM, C, Time

CHUNKS = 24
SALTS = ("", "a")
NAMES = ("one", "two", "three")
NEAR = f"near://?capacity={40 * AT_REST}&write=always"

salts = st.sampled_from(SALTS)
names = st.sampled_from(NAMES)
lengths = st.integers(1, 7)


def keys(salt: str, name: str, length: int) -> list[bytes]:
    """Prompts of a tenant share their first two chunks."""
    words = ["system"] * min(2, length) + [name] * max(0, length - 2)
    digests = [hashlib.sha256(f"{salt} {word} {n}".encode()).digest() for n, word in enumerate(words)]
    return [b"test" + tenant(salt) + digest[8:] for digest in digests]


class Hints(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(sorted(POLICIES)), has_tier=st.booleans())
    def begin(self, policy: str, has_tier: bool) -> None:
        self.time = Time()
        tiers = [f"cpu://?capacity={CHUNKS * ROOM}&policy={policy}", *([NEAR] if has_tier else [])]
        config = Config(tiers=tiers, chunk_tokens=C, prefault=False, shares=parse("a=40%"))
        opened = {NEAR: MemoryTier()} if has_tier else None
        self.cache = Cache(config, tiers=opened, clock=self.time)
        self.parents: dict[tuple[str, str], tuple[str, str] | None] = {}
        """Who is alive, and who started it."""
        self.over: set[tuple[str, str]] = set()
        """Who has ended, but has children that live."""
        self.kept: dict[tuple[str, str], tuple[float, list[bytes]]] = {}
        """What is pinned by hints: until when, and the chunks that were in memory then."""
        self.mortal: set[bytes] = set()
        """Chunks that were given an end."""
        self.said: dict[str, list[tuple[dict[str, Any], str]]] = {salt: [] for salt in SALTS}
        """Envelopes whose only action was done."""
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close(timeout=5)
            self.cache.check()

    # ---- requests

    @rule(
        asked=st.lists(st.tuples(salts, names, st.integers(1, 7), st.none() | names), min_size=1, max_size=5)
    )
    def ask_some(self, asked: list[tuple[str, str, int, str | None]]) -> None:
        for each in asked:
            self.ask(*each)

    def ask(self, salt: str, name: str, length: int, parent: str | None) -> None:
        before = self.held()
        used = {pool.name: pool.used - pool.share_bytes for pool in self.cache.index.pools or ()}
        chain = keys(salt, name, length)
        match = self.cache.wait(self.cache.match(chain, ONE, session=name, parent=parent or ""))
        self.cache.release(match)
        reservation = self.cache.reserve(chain, ONE)
        if reservation.chunks:
            self.cache.commit(reservation)
        who = salt, name
        self.over.discard(who)
        if who not in self.parents:
            self.parents[who] = None
        if parent and parent != name and self.parents[who] is None:
            above: tuple[str, str] | None = (salt, parent)
            self.parents.setdefault((salt, parent), None)
            while above is not None and above != who:
                above = self.parents[above]
            self.parents[who] = None if above == who else (salt, parent)
        lost = {key for key in before - self.held() if key not in self.mortal}
        for other in SALTS:  # who was within its share lost nothing to this request
            if other and other != salt and used[other] <= 0:
                assert not {key for key in lost if key[4:8] == tenant(other)}

    @rule(seconds=st.sampled_from((0.5, 5.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.time.pass_by(seconds)
        self.kept = {who: each for who, each in self.kept.items() if each[0] > self.time()}

    @rule()
    def step(self) -> None:
        self.cache.step()

    # ---- hints

    def someone(self, data: st.DataObject) -> tuple[str, str]:
        """Mostly somebody who is alive."""
        alive = st.sampled_from(sorted(self.parents)) if self.parents else st.nothing()
        return data.draw(alive | alive | st.tuples(salts, names))

    def hint(self, salt: str, kind: str, payload: dict[str, Any]) -> str:
        self.number += 1
        said = envelope(f"m{self.number}", (kind, payload))
        others = self.others(salt)
        (outcome,) = self.cache.hint(actions_of(said), tenant(salt))
        assert self.others(salt) == others  # it reaches no other tenant
        if outcome.result == DONE:
            self.said[salt].append((said, kind))
        return outcome.result

    @rule(data=st.data(), kind=st.sampled_from(("pin", "retain")))
    def pin(self, data: st.DataObject, kind: str) -> None:
        salt, name = self.someone(data)
        seconds = None if kind == "pin" else 30.0
        payload = {"session": name} | ({"seconds": seconds} if seconds else {})
        result = self.hint(salt, kind, payload)
        who = salt, name
        assert result in ((DONE, REFUSED) if who in self.parents else (REFUSED,))
        if result == DONE:
            agent = self.cache.sessions.get(tenant(salt), name)
            assert agent is not None
            end = self.time() + (seconds or hints.MAX_PIN)
            self.kept[who] = end, [key for key in agent.chain if key in self.cache.index]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        salt, name = self.someone(data)
        assert self.hint(salt, "release", {"session": name}) == DONE
        self.kept.pop((salt, name), None)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        salt, name = self.someone(data)
        who: tuple[str, str] | None = (salt, name)
        result = self.hint(salt, "session_end", {"session": name})
        assert result == (DONE if who in self.parents else REFUSED)
        if who not in self.parents:
            return
        self.kept.pop((salt, name), None)
        assert who is not None
        self.over.add(who)
        while who in self.over and who not in self.parents.values():
            self.over.remove(who)
            who = self.parents.pop(who)

    @rule(data=st.data(), what=st.sampled_from(("person", "tool")))
    def session_wait(self, data: st.DataObject, what: str) -> None:
        salt, name = self.someone(data)
        result = self.hint(salt, "session_wait", {"session": name, "for": what})
        assert result == (DONE if (salt, name) in self.parents else REFUSED)

    @rule(data=st.data(), kind=st.sampled_from(("demote", "prefetch")))
    def move(self, data: st.DataObject, kind: str) -> None:
        salt, name = self.someone(data)
        result = self.hint(salt, kind, {"session": name})
        assert result in ((DONE, REFUSED) if (salt, name) in self.parents else (REFUSED,))

    @rule(data=st.data(), seconds=st.sampled_from((1.0, 20.0)))
    def ttl(self, data: st.DataObject, seconds: float) -> None:
        salt, name = self.someone(data)
        agent = self.cache.sessions.get(tenant(salt), name)
        if self.hint(salt, "ttl", {"session": name, "seconds": seconds}) == DONE:
            assert agent is not None
            self.mortal.update(self.cache.sessions.own(agent))

    @precondition(lambda self: any(self.said.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        salt = data.draw(st.sampled_from([salt for salt in SALTS if self.said[salt]]))
        said, _ = data.draw(st.sampled_from(self.said[salt]))
        before = self.picture(SALTS)
        assert [each.result for each in self.cache.hint(actions_of(said), tenant(salt))] == [REPEATED]
        assert self.picture(SALTS) == before

    @rule(mine=salts, theirs=salts, name=names, kind=st.sampled_from(hints.ACTIONS))
    def reach_for_another(self, mine: str, theirs: str, name: str, kind: str) -> None:
        if mine != theirs:
            names = [key.hex() for key in keys(theirs, name, 4)]
            assert (
                self.hint(mine, kind, {"keys": names, "seconds": 1} if kind == "ttl" else {"keys": names})
                == REFUSED
            )

    # ---- what must be true

    def held(self) -> set[bytes]:
        return {entry.key for entry in self.cache.index.entries()}

    def others(self, salt: str) -> object:
        return self.picture([each for each in SALTS if each != salt])

    def picture(self, salts: Sequence[str]) -> object:
        """Everything of these tenants that hints can change."""
        mine = {tenant(salt) for salt in salts}
        book = {(each.tenant, each.name, each.state, each.children) for each in self.cache.sessions.book}
        entries = self.cache.index.entries()
        order = [entry.key for entry in self.cache.index.order() if entry.key[4:8] in mine]
        return (
            {each for each in book if each[0] in mine},
            {pin.name for pin in self.cache.pinned() if bytes.fromhex(pin.name.split()[0]) in mine},
            {
                (entry.key, self.cache.index.expiries.expiry(entry))
                for entry in entries
                if entry.key[4:8] in mine
            },
            sorted(order),
        )

    @invariant()
    def it_is_sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        alive = {(each.tenant, each.name) for each in self.cache.sessions.book if each.name}
        assert alive == {(tenant(salt), name) for salt, name in self.parents}
        held = self.held()
        for _, chunks in self.kept.values():
            assert not {key for key in chunks if key not in self.mortal} - held


@pytest.mark.parametrize("walks", [pytest.param(25), pytest.param(400, marks=pytest.mark.slow)])
def test_any_history_of_hints(walks):
    run_state_machine_as_test(
        Hints,
        settings=settings(
            max_examples=walks,
            stateful_step_count=40,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
