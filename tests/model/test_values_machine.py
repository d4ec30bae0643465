"""Named values over random histories of writes, deletes, reads, faults, evictions and kills.

Whoever was told that a value was replaced or deleted, or has read it, never meets an older one again in this
process. After a kill at any moment the value is one that was written, and none that is older than a deletion
or a flush that was confirmed.
"""

from __future__ import annotations

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
from lmtier.format.keys import is_value
from lmtier.format.layout import PAGE, Name
from lmtier.server.values import Values
from lmtier.tiers.base import Op, Reason
from tests.model.hand import HandTier

NAMES = [b"a", b"b", b"c", b"d"]
NEVER = 0


def written(name: bytes, version: int, size: int) -> bytes:
    return b"%s %d." % (name, version) * size


class ValuesMachine(RuleBasedStateMachine):
    @initialize(slab=st.integers(2, 8), disk=st.integers(2, 12), near=st.booleans())
    def start(self, slab: int, disk: int, near: bool) -> None:
        self.urls = [f"cpu://?capacity={slab * PAGE}", f"near://?capacity={disk * 2 * PAGE}"]
        if near:
            self.urls.append(f"next://?capacity={disk * 4 * PAGE}")
        self.kept: dict[str, dict[Name, bytes]] = {url: {} for url in self.urls[1:]}
        self.versions = 0
        self.contents: dict[bytes, dict[int, bytes]] = {name: {} for name in NAMES}
        self.told = dict.fromkeys(NAMES, NEVER)
        """Of each name, the last version that this process cannot show any more."""
        self.durable = dict.fromkeys(NAMES, NEVER)
        """Of each name, the last version that no restart can find any more."""
        self.begun: dict[int, tuple[str, bytes, int, Any]] = {}
        self.open()

    def open(self) -> None:
        self.tiers = {url: HandTier(kept, keeps=True) for url, kept in self.kept.items()}
        config = Config(tiers=self.urls, chunk_tokens=2, load_deadline=3600, prefault=False)
        self.cache = Cache(config, tiers=self.tiers, is_record=is_value)
        self.values = Values(self.cache)
        self.begun = {}

    def go_on(self, number: int) -> None:
        """Resume a call that waits; check what it returns."""
        what, name, version, call = self.begun[number]
        try:
            next(call)
            return
        except StopIteration as stop:
            del self.begun[number]
            result = stop.value
        if what == "put" or (what == "forget" and result is not None):
            self.told[name] = max(self.told[name], version)
        if what == "forget" and result is not None:
            self.durable[name] = max(self.durable[name], version)
        elif what == "get" and result is not None:
            data = bytes(result.view)
            self.values.release(result)
            found = [v for v, content in self.contents[name].items() if content == data]
            assert found, f"{name!r} holds {data[:40]!r}, which nobody wrote there"
            # `version` is what had been confirmed when the read began.
            assert found[0] > version, f"{name!r}: version {found[0]} came back after {version} was gone"
            self.told[name] = max(self.told[name], found[0] - 1)

    def begin(self, what: str, name: bytes, version: int, call: Any) -> None:
        number = self.versions = self.versions + 1
        self.begun[number] = (what, name, version, call)
        self.go_on(number)

    @rule(name=st.sampled_from(NAMES), size=st.integers(0, 900))
    def put(self, name: bytes, size: int) -> None:
        version = self.versions + 1
        content = written(name, version, size) if size else b""
        draft = self.values.draft(len(content))
        if draft is None or not content:
            if draft is not None:
                self.values.discard_draft(draft)
            return
        draft.view[:] = content
        self.contents[name][version] = content
        # Confirmed, it is the newest that may be read: everything before it is gone, not itself.
        self.begin("put", name, self.before(name, version), self.values.put(draft, name))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: bytes) -> None:
        self.begin("forget", name, self.before(name, self.versions + 1), self.values.delete(name))

    def before(self, name: bytes, version: int) -> int:
        """The last version that is gone after a write or a deletion that begins now.

        A write that still waits to begin may come after it: both are under way at once, in either order.
        """
        waiting = [
            number
            for number, (what, other, _, call) in self.begun.items()
            if what == "put" and other == name and call.gi_yieldfrom is None
        ]
        return min([version, *waiting]) - 1

    @rule(name=st.sampled_from(NAMES))
    def get(self, name: bytes) -> None:
        self.begin("get", name, self.told[name], self.values.get(name))

    @rule(
        which=st.lists(st.integers(0, 9), max_size=6),
        fault=st.sampled_from((None, None, None, Reason.ERROR, Reason.CORRUPT, Reason.FULL, Reason.ABSENT)),
    )
    def step(self, which: list[int], fault: Reason | None) -> None:
        for tier in self.tiers.values():
            for number in which:
                if tier.waiting:
                    deletes = tier.waiting[number % len(tier.waiting)].op is Op.DELETE
                    tier.fault = Reason.ERROR if deletes and fault else fault
                    tier.finish(number)
            tier.fault = None
        self.cache.step()
        for number in list(self.begun):
            self.go_on(number)

    @precondition(lambda self: self.begun)
    @rule(which=st.integers(0, 9))
    def hang_up(self, which: int) -> None:
        number = list(self.begun)[which % len(self.begun)]
        self.begun.pop(number)[3].close()

    @rule()
    def scan(self) -> None:
        call, found, cursor = self.values.scan(0, 2), [], 0
        for _ in range(50):
            try:
                next(call)
            except StopIteration as stop:
                cursor, names = stop.value
                found += names
                if not cursor:
                    break
                call = self.values.scan(cursor, 2)
                continue
            for tier in self.tiers.values():
                while tier.waiting:
                    tier.finish(0)
            self.cache.step()
        assert set(found) <= set(NAMES)

    @rule()
    def flush(self) -> None:
        self.finish_all()
        if not any(tier.backlog for tier in self.cache.lower):
            self.durable |= {name: max(self.durable[name], self.told[name]) for name in NAMES}

    @rule()
    def kill(self) -> None:
        """Whatever a tier has finished stays; all else is lost. Nobody is told anything any more."""
        self.open()
        self.told = dict(self.durable)
        for name in NAMES:
            self.get(name)
        self.finish_all()
        for number in list(self.begun):
            self.go_on(number)

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for *_, call in self.begun.values():
                call.close()
            self.finish_all()
            self.cache.clear()
            self.finish_all()
            self.cache.check()
            assert self.cache.slab.used == 0, "room was lost"
            self.cache.close(timeout=1)

    def finish_all(self) -> None:
        for _ in range(100):
            for tier in self.tiers.values():
                while tier.waiting:
                    tier.finish(0)
            if not self.cache.step() and not any(tier.waiting for tier in self.tiers.values()):
                return
        raise AssertionError("the tiers are never done")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "walks"), [(20, 100), (80, 50), pytest.param(80, 150, marks=pytest.mark.slow)]
)
def test_what_was_replaced_or_deleted_never_comes_back(steps: int, walks: int):
    run_state_machine_as_test(
        ValuesMachine,
        settings=settings(
            max_examples=walks,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


def test_a_value_is_deleted_though_its_tier_fails_just_then():
    """The machine found it, once: the header could not be read, so the value was not there, for a while."""
    machine = ValuesMachine()
    machine.start(slab=4, disk=8, near=False)
    machine.put(b"a", 5)
    machine.finish_all()
    machine.open()  # now it is on disk alone
    machine.finish_all()
    machine.forget(b"a")
    machine.step([0], Reason.ERROR)
    for _ in range(20):
        machine.step([0], None)
    assert machine.told[b"a"], "deleting it does not end"
    machine.kill()  # reads all, and checks
    machine.teardown()
