"""Random walks over tenants, rotations, forgets, backups and restarts, beside a model of who can read."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmtier.format.keys import tenant
from lmtier.format.layout import Name
from lmtier.testing import MemoryTier, load, replace_start, sample, store
from lmtier.tiers.base import Reason
from lmtier.tiers.keyring import Keyring
from tests.sealed import key_file

TENANTS = [tenant(name) for name in ("alice", "bob")]
OBJECTS = {
    (who, number): replace_start(sample(number, 1), b"mod_" + who) for who in TENANTS for number in range(2)
}
which = st.sampled_from(sorted(OBJECTS))


@dataclass(frozen=True)
class Sealing:
    """With which key of the tier, and in which life of its tenant. None: not with a key of its own."""

    key: int
    life: int | None


class SealingMachine(RuleBasedStateMachine):
    """A tier in front of storage that others can copy and put back."""

    @initialize(with_tenants=st.booleans())
    def begin(self, with_tenants: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sealing-"))
        self.has_tenants = with_tenants
        self.known = [0]
        """The numbers of the tier's keys, the current one first."""
        self.made = 1
        self.lives = dict.fromkeys(TENANTS, 0)
        self.dropped = [dict(self.lives), dict(self.lives)]
        """By process: the life of each tenant from before which its memory holds nothing."""
        self.key_files: dict[bytes, tuple[int, bytes]] = {}
        """The file with the keys of a tenant as it once was, and the life from which it is."""
        self.objects: dict[Name, bytes] = {}
        self.stored: dict[Name, Sealing] = {}
        self.backup: tuple[dict[Name, bytes], dict[Name, Sealing]] = ({}, {})
        self.tiers: list[MemoryTier] = []
        key_file(self.folder, *self.known)
        self.open()
        self.open()

    def open(self) -> None:
        """Another process over the same storage and the same keys."""
        tenants = str(self.folder / "tenants") if self.has_tenants else ""
        tier = MemoryTier(self.objects)
        tier.use_keys(Keyring(f"file:{self.folder / 'keys'}", tenants))
        self.tiers.append(tier)

    def teardown(self) -> None:
        for tier in getattr(self, "tiers", ()):
            tier.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    # ---- what happens

    @rule(which=which, process=st.integers(0, 1))
    def save(self, which: tuple[bytes, int], process: int) -> None:
        each, (who, _) = OBJECTS[which], which
        done = store(self.tiers[process], each)
        if self.dropped[process][who] < self.lives[who]:
            assert done.failed == {each.name: Reason.CLEARED}, "it could be from before"
            return
        assert done.ok == {each.name: None}
        self.stored[each.name] = Sealing(self.known[0], self.lives[who] if self.has_tenants else None)
        if self.has_tenants:
            self.key_files[who] = self.lives[who], self.key_file_of(who).read_bytes()

    def key_file_of(self, who: bytes) -> Path:
        return self.folder / "tenants" / who.hex()

    @rule(process=st.integers(0, 1))
    def read(self, process: int) -> None:
        for which in OBJECTS:
            self.read_one(which, process)

    def read_one(self, which: tuple[bytes, int], process: int) -> None:
        each, (who, _) = OBJECTS[which], which
        done, payload = load(self.tiers[process], each.name, each.room)
        sealing = self.stored.get(each.name)
        if sealing is None:
            assert done.failed == {each.name: Reason.ABSENT}
        elif sealing.key in self.known and sealing.life in (None, self.lives[who]):
            assert done.ok == {each.name: each.header}
            assert payload == each.payload
        else:
            assert done.failed == {each.name: Reason.SEALED}
            assert each.name in self.objects, "not deleted unless told"

    @rule(who=st.sampled_from(TENANTS), process=st.integers(0, 1))
    def forget(self, who: bytes, process: int) -> None:
        ring = self.tiers[process].keys
        assert ring is not None
        if ring.tenants is not None:
            ring.tenants.forget(who)
            self.lives[who] += 1

    @rule(who=st.sampled_from(TENANTS), process=st.integers(0, 1))
    def drop(self, who: bytes, process: int) -> None:
        """The memory above a tier has dropped what is from before the last tombstone."""
        ring = self.tiers[process].keys
        assert ring is not None
        if ring.tenants is not None:
            ring.tenants.dropped[who] = self.dropped[process][who] = self.lives[who]

    @rule(who=st.sampled_from(TENANTS))
    def put_back(self, who: bytes) -> None:
        """An administrator puts back the destroyed keys of a tenant."""
        life, keys = self.key_files.get(who, (0, b""))
        if keys and life < self.lives[who] and not self.key_file_of(who).exists():
            self.key_file_of(who).write_bytes(keys)

    @precondition(lambda self: len(self.known) < 3)
    @rule()
    def rotate(self) -> None:
        """A new key in front, as an operator writes it while servers run."""
        self.known.insert(0, self.made)
        self.made += 1
        key_file(self.folder, *self.known)

    @precondition(lambda self: len(self.known) > 1)
    @rule()
    def retire(self) -> None:
        """The oldest key is no longer in the file."""
        self.known.pop()
        key_file(self.folder, *self.known)

    @rule(process=st.integers(0, 1))
    def restart(self, process: int) -> None:
        self.tiers[process].close()
        self.open()
        self.tiers[process] = self.tiers.pop()
        self.dropped[process] = dict(self.lives)

    @rule()
    def back_up(self) -> None:
        self.backup = (dict(self.objects), dict(self.stored))

    @rule()
    def restore(self) -> None:
        objects, self.stored = dict(self.backup[0]), dict(self.backup[1])
        self.objects.clear()
        self.objects.update(objects)

    @rule(which=which)
    def plant(self, which: tuple[bytes, int]) -> None:
        """Somebody writes an object that is not sealed."""
        each = OBJECTS[which]
        before = self.objects.get(each.name)
        self.objects[each.name] = each.at_rest()
        done, _ = load(self.tiers[0], each.name, each.room)
        assert done.failed == {each.name: Reason.UNSEALED}
        assert each.name not in self.objects
        if before is not None:
            self.objects[each.name] = before

    # ---- what always holds

    @invariant()
    def storage_shows_nothing(self) -> None:
        for data in getattr(self, "objects", {}).values():
            assert data[8:12] == b"\2\0\0\0"


FEW = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=120, stateful_step_count=60)


def test_only_who_has_the_keys_reads_whatever_happens():
    run_state_machine_as_test(SealingMachine, settings=FEW)


@pytest.mark.slow
def test_only_who_has_the_keys_reads_however_much_happens():
    run_state_machine_as_test(SealingMachine, settings=MANY)
