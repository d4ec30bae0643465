"""Transactions: nobody comes between, nothing is half done, and what is queued is bounded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import EntryState
from lmtier.format.keys import is_value, value_key
from lmtier.format.layout import Name
from lmtier.observe.metrics import Metrics
from lmtier.server.access import Role, RoleTokens, WrongTokens
from lmtier.server.api import Asker
from lmtier.server.commands import ALREADY_SENT, Caller, Payload
from lmtier.server.dispatch import Dispatch
from lmtier.server.engines import EngineVerbs
from lmtier.server.redis import redis_table
from lmtier.server.redis.service import ServerCommands
from lmtier.server.transactions import Transactions
from lmtier.server.values import Values
from lmtier.testing import Gate, MemoryTier, SlowTier
from lmtier.wire.command_reader import DROP
from lmtier.wire.resp import Error, NullArray, encode_command
from tests.server.process import MIB, served, until

URL = "memory://?capacity=64MiB"


class Room:
    """Values over a tier behind a gate, and clients without sockets."""

    def __init__(self, objects: dict[Name, bytes], gate: Gate) -> None:
        config = Config(tiers=("cpu://?capacity=1MiB", URL), prefault=False, load_deadline=30)
        self.gate = gate
        self.cache = Cache(config, tiers={URL: SlowTier(MemoryTier(objects), gate)}, is_record=is_value)
        self.values = Values(self.cache)
        self.transactions = Transactions(self.values)
        service = ServerCommands(
            tokens=lambda: RoleTokens({}),
            wrong=WrongTokens(Metrics()),
            info=dict,
            settings=dict,
            present=list,
            kill=bool,
        )
        self.table = {**redis_table(self.values, service), **self.transactions.table()}

    def ask(self, caller: Caller, *words: str) -> Any:
        """As the server does it: an answer, or a generator that waits for it."""
        args: list[Any] = [word.encode() for word in words]
        name, entry = args[0], self.table[args[0]]
        if self.transactions.must_queue(caller, name):
            return self.transactions.queue_command(caller, name, entry, args)
        return self.transactions.run(caller, entry, args)

    def turn(self) -> None:
        self.cache.step()
        self.transactions.turn()

    def end(self, answer: Any) -> Any:
        """All that is answered in the end, as bytes where it comes in parts."""
        if not isinstance(answer, GeneratorType):
            return answer
        said = b""
        while True:
            try:
                part = next(answer)
            except StopIteration as stop:
                return said if stop.value is ALREADY_SENT else self.text(stop.value)
            said += self.text(part) if part is not None else b""
            self.turn()

    @staticmethod
    def text(answer: Any) -> Any:
        if not isinstance(answer, Payload):
            return answer
        said = bytes(answer.view)
        answer.on_sent()
        return said


@pytest.fixture
def room() -> Iterator[Room]:
    objects: dict[Name, bytes] = {}
    gate = Gate()
    before = Room(objects, gate)
    assert before.end(before.ask(Caller(0, "before"), "SET", "below", "deep")) == "OK"
    before.cache.close(5)
    room = Room(objects, gate)
    yield room
    gate.open()
    room.transactions.close()
    room.cache.flush(5)
    room.cache.check()
    assert room.cache.index.leased_bytes == 0, "something is held for nobody"
    room.cache.close(5)


def waiting(room: Room, caller: Caller) -> Any:
    """A transaction that reads what the tier has not given yet, and then writes `k`."""
    room.gate.hold()
    for words in (("MULTI",), ("GET", "below"), ("SET", "k", "new")):
        room.ask(caller, *words)
    answer = room.ask(caller, "EXEC")
    assert next(answer) is None
    return answer


def test_only_commands_on_a_transactions_names_wait_for_it(room):
    ours, theirs = Caller(1, "ours"), Caller(2, "theirs")
    assert room.end(room.ask(theirs, "SET", "k", "old")) == "OK"
    transaction = waiting(room, ours)
    reads, writes = room.ask(theirs, "GET", "k"), room.ask(theirs, "DEL", "k")
    for _ in range(3):
        room.turn()
        assert next(reads) is None
        assert next(writes) is None
    assert room.end(room.ask(theirs, "SET", "other", "x")) == "OK"
    room.gate.open()
    assert room.end(transaction) == b"*2\r\ndeep+OK\r\n"
    assert room.end(reads) == b"new"
    assert room.end(writes) == 1


def test_a_later_transaction_sees_what_an_earlier_one_did(room):
    ours, theirs = Caller(1, "ours"), Caller(2, "theirs")
    assert room.end(room.ask(theirs, "WATCH", "k")) == "OK"
    transaction = waiting(room, ours)
    room.ask(theirs, "MULTI")
    room.ask(theirs, "SET", "k", "lost")
    second = room.ask(theirs, "EXEC")
    assert next(second) is None
    room.gate.open()
    assert b"OK" in room.end(transaction)
    assert room.end(second) is NullArray, "k has changed since it was watched"
    assert room.end(room.ask(theirs, "GET", "k")) == b"new"


def test_a_transaction_whose_client_dies_is_done_to_its_end(room):
    ours = Caller(1, "ours")
    waiting(room, ours).close()
    room.transactions.drop_client(ours)
    room.gate.open()
    until(lambda: (room.turn(), not room.transactions.are_running)[1])
    assert room.end(room.ask(Caller(2, "theirs"), "GET", "k")) == b"new"


def behind(room: Room, nbytes: int) -> int:
    """Store values until one has to wait for the tier, which stands still. The number of those before."""
    room.gate.hold()
    filler = Caller(9, "filler")
    for number in range(1000):
        answer = room.ask(filler, "SET", f"filler {number}", "x" * nbytes)
        if not isinstance(answer, GeneratorType):
            room.turn()
            continue
        for _ in range(50):  # an answer that does not wait needs fewer turns
            if next(answer, "it has ended") is not None:
                break
            room.turn()
        else:
            answer.close()
            return number
    raise AssertionError("it never waits")


@pytest.mark.parametrize("nbytes", [1, 20_000, 50_000])
def test_no_value_is_acknowledged_that_could_not_be_written(room, nbytes):
    """Whatever part of the room that is left it needs."""
    acknowledged = behind(room, nbytes)
    assert acknowledged > 4
    assert room.cache.metrics.value("lmtier_dropped_objects_total", tier="memory", reason="queue_full") == 0
    room.gate.open()
    until(lambda: room.turn() or room.cache.flush(0))
    assert len(room.values) >= acknowledged


def test_of_two_that_set_what_is_not_there_one_does(room):
    behind(room, 1)
    first = room.ask(Caller(1, "ours"), "SETNX", "lock", "a")
    assert next(first) is None
    theirs = Caller(2, "theirs")
    second = room.ask(theirs, "SETNX", "lock", "b")
    assert next(second) is None
    room.gate.open()
    assert [room.end(first), room.end(second)] == [1, 0]
    assert room.end(room.ask(Caller(1, "ours"), "GET", "lock")) == b"a"
    while theirs.drafts:  # as a connection does it
        room.values.discard_draft(theirs.drafts.pop())


def test_a_new_time_does_not_bring_an_old_value_back(room):
    assert room.end(room.ask(Caller(1, "ours"), "SET", "k", "old")) == "OK"
    behind(room, 1)
    retimed = room.ask(Caller(1, "ours"), "EXPIRE", "k", "100")
    assert next(retimed) is None
    written = room.ask(Caller(2, "theirs"), "SET", "k", "new")
    assert next(written) is None
    reads = room.ask(Caller(3, "reader"), "GET", "k")
    assert room.end(reads) == b"old", "a read waits for nobody"
    room.gate.open()
    assert room.end(retimed) == 1
    assert room.end(written) == "OK"
    assert room.end(room.ask(Caller(1, "ours"), "GET", "k")) == b"new"


def test_a_new_time_does_not_bring_back_what_was_deleted(room):
    assert room.end(room.ask(Caller(1, "ours"), "SET", "k", "old")) == "OK"
    behind(room, 1)
    retimed = room.ask(Caller(1, "ours"), "EXPIRE", "k", "100")
    assert next(retimed) is None
    flushed = room.ask(Caller(2, "theirs"), "FLUSHALL")
    room.gate.open()
    assert room.end(flushed) == "OK"
    assert room.end(retimed) == 0, "there is nothing to expire"
    assert room.end(room.ask(Caller(1, "ours"), "GET", "k")) is None


def test_deleting_an_expired_value_spares_a_newer_one():
    objects: dict[Name, bytes] = {}
    gate = Gate()
    before = Room(objects, gate)
    assert before.end(before.ask(Caller(0, "before"), "SET", "k", "old", "PX", "1")) == "OK"
    before.cache.close(5)
    room = Room(objects, gate)
    gate.hold()
    reads = room.ask(Caller(1, "ours"), "GET", "k")
    assert next(reads) is None
    written = room.ask(Caller(2, "theirs"), "SET", "k", "new", "GET")
    while next(written) is not None:
        pass
    gate.open()
    key = value_key(b"k")
    until(
        lambda: (room.cache.step(), (entry := room.cache.index.get(key)) and entry.state is EntryState.READY)[
            1
        ]
    )
    assert room.end(written) is None
    assert room.end(reads) == b"new", "it came during the wait"
    assert room.end(room.ask(Caller(1, "ours"), "GET", "k")) == b"new"
    room.cache.close(5)


def test_the_work_for_writes_that_wait_does_not_explode(room):
    """Each looks at those before it, so twice as many take four times as long."""
    behind(room, 1)

    def calls(count: int) -> int:
        callers = [Caller(number, "ours") for number in range(count)]
        writes = [room.ask(caller, "DEL", "k") for caller in callers]
        for each in writes:
            next(each)
        seen = 0

        def see(frame: object, event: str, arg: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(see)
        for each in writes:
            next(each)
        sys.setprofile(None)
        for each in reversed(writes):
            each.close()
        return seen

    first = room.ask(Caller(0, "first"), "SET", "k", "v")
    assert next(first) is None
    few, many = calls(50), calls(200)
    assert many < 20 * few
    first.close()


def test_a_write_waits_for_no_later_transaction(room):
    first = waiting(room, Caller(1, "ours"))
    written = room.ask(Caller(2, "theirs"), "SET", "k", "plain")
    assert next(written) is None
    other = Caller(3, "other")
    for words in (("MULTI",), ("SET", "k", "last")):
        room.ask(other, *words)
    second = room.ask(other, "EXEC")
    assert next(second) is None
    room.gate.open()
    assert b"OK" in room.end(first)
    for _ in range(3):
        room.turn()
    assert room.end(written) == "OK"
    assert b"OK" in room.end(second)
    assert room.end(room.ask(Caller(1, "ours"), "GET", "k")) == b"last"


def test_who_may_not_store_gets_no_room_for_a_value(room):
    dispatch = Dispatch(room.cache, room.values, room.transactions, room.table)
    for role in Role:
        caller = Caller(1, "ours", role=role)
        place = dispatch.payload_target(caller, [b"SET", b"k"], 3, 1000)
        assert (place is not DROP) == (role >= Role.ENGINE)
        dispatch.drop_drafts(caller)


def test_a_transaction_that_waits_ends_with_its_client(room):
    first, ours = waiting(room, Caller(1, "first")), Caller(2, "ours")
    room.ask(ours, "MULTI")
    room.ask(ours, "SET", "k", "lost")
    queued = room.transactions.held_bytes(ours)
    second = room.ask(ours, "EXEC")
    assert next(second) is None
    assert room.transactions.held_bytes(ours) >= queued > 0
    second.close()
    room.transactions.drop_client(ours)
    room.turn()
    assert room.transactions._waiting == []
    room.gate.open()
    room.end(first)
    assert room.end(room.ask(Caller(3, "reader"), "GET", "k")) == b"new"


def test_a_transaction_sees_the_write_that_was_under_way(room):
    ours, theirs = Caller(1, "ours"), Caller(2, "theirs")
    behind(room, 1)
    room.ask(theirs, "WATCH", "k")
    written = room.ask(ours, "SET", "k", "new")
    assert next(written) is None
    room.ask(theirs, "MULTI")
    room.ask(theirs, "SET", "k", "lost")
    transaction = room.ask(theirs, "EXEC")
    assert next(transaction) is None
    room.turn()
    assert not room.transactions.goes_on, "it waits, and needs no turn at once"
    later = room.ask(Caller(3, "later"), "SET", "k", "later")
    assert next(later) is None
    room.gate.open()
    assert room.end(written) == "OK"
    assert next(later) is None, "it came after the transaction"
    assert room.end(transaction) is NullArray
    assert room.end(later) == "OK"


def test_writes_of_one_name_are_done_in_their_order(room):
    behind(room, 1)
    writes = []
    for number in range(4):
        writes.append(room.ask(Caller(number, "ours"), "SET", "k", str(number)))
        assert next(writes[-1]) is None
    room.gate.open()
    for number in (0, 1):
        assert room.end(writes[number]) == "OK"
        assert next(writes[3]) is None
    assert [room.end(each) for each in writes[2:]] == ["OK", "OK"]
    assert room.end(room.ask(Caller(5, "reader"), "GET", "k")) == b"3"


def test_a_flush_in_a_transaction_stops_no_nameless_command(room):
    room.gate.hold()
    ours = Caller(1, "ours")
    for words in (("MULTI",), ("GET", "below"), ("FLUSHALL",)):
        room.ask(ours, *words)
    transaction = room.ask(ours, "EXEC")
    assert next(transaction) is None
    assert room.ask(Caller(2, "theirs"), "PING") == "PONG"
    room.gate.open()
    room.end(transaction)


def test_a_clear_waits_for_a_transaction_that_runs(room):
    transaction = waiting(room, Caller(1, "ours"))
    api = EngineVerbs(room.cache, alone=room.transactions.alone).api
    clear = api.run("/api/clear", {}, Asker("an operator", Role.ADMIN))
    assert next(clear) is None
    room.gate.open()
    assert b"OK" in room.end(transaction)
    assert room.end(clear) == b"{}"


def test_a_flush_of_all_waits_for_nothing_later(room):
    """Else clients whose transactions overlap keep it waiting for ever."""
    first = waiting(room, Caller(1, "ours"))
    flush = room.ask(Caller(2, "admin"), "FLUSHALL")
    assert next(flush) is None
    other = Caller(3, "other")
    for words in (("MULTI",), ("SET", "later", "v")):
        room.ask(other, *words)
    second = room.ask(other, "EXEC")
    plain = room.ask(Caller(4, "plain"), "SET", "plain", "v")
    assert next(second) is None
    assert next(plain) is None
    room.gate.open()
    assert b"OK" in room.end(first)
    assert room.end(flush) == "OK"
    assert b"OK" in room.end(second)
    assert room.end(plain) == "OK"
    reader = Caller(5, "reader")
    assert [room.end(room.ask(reader, "GET", name)) for name in ("k", "later", "plain")] == [None, b"v", b"v"]


def test_a_queue_without_an_exec_ends_with_its_client(room):
    ours = Caller(1, "ours")
    room.ask(ours, "WATCH", "k", "below")
    room.ask(ours, "MULTI")
    room.ask(ours, "SET", "k", "v")
    room.transactions.drop_client(ours)
    assert room.values._watches == {}
    assert room.end(room.ask(Caller(2, "theirs"), "GET", "k")) is None


def test_a_value_that_leaves_by_itself_breaks_a_watch_too(room):
    ours = Caller(1, "ours")
    assert room.end(room.ask(ours, "SET", "k", "v")) == "OK"
    room.ask(ours, "WATCH", "k")
    room.cache.clear(force=True)
    room.ask(ours, "MULTI")
    assert room.end(room.ask(ours, "EXEC")) is NullArray


# ---- a real server


def test_a_queue_is_bounded_in_bytes_and_in_room(tmp_path: Path):
    with served(tmp_path, "cpu://?capacity=16MiB") as server, server.connect() as wire:
        before = server.rss()
        wire.expect("OK", "MULTI")
        name = "n" * 3000
        for _ in range(20):
            wire.send(encode_command("EXISTS", *[name] * 300) * 10)
        answers = [wire.reply() for _ in range(200)]
        assert answers[0] == "QUEUED"
        assert any("take 16 MiB at most here" in each for each in answers)
        wire.expect(Error("EXECABORT Transaction discarded because of previous errors."), "EXEC")
        assert server.rss() - before < 64 * MIB
        wire.expect("OK", "MULTI")
        for _ in range(3):
            said = wire.ask("SET", "k", bytes(4 * MIB))
        assert said.startswith("OOM")
        assert server.held()[0] == 0, "what was queued before gives its room back at once"
        assert wire.ask("EXEC").startswith("EXECABORT")
        wire.expect(None, "GET", "k")


def test_a_transactions_answers_are_bounded(tmp_path: Path):
    """What it writes is written all the same."""
    with served(tmp_path) as server, server.connect(60) as wire:
        before = server.rss()
        names = [f"{i:03}" + "n" * 3000 for i in range(100)]
        wire.expect("OK", "MSET", *(word for name in names for word in (name, "")))
        wire.send(
            encode_command("MULTI")
            + encode_command("KEYS", "*") * 300
            + encode_command("SET", "k", "v")
            + encode_command("EXEC")
        )
        assert [wire.reply() for _ in range(302)][-1] == "QUEUED"
        answers = wire.reply()
        assert len(answers) == 301
        assert sorted(answers[0]) == sorted(name.encode() for name in names)
        assert answers[-2] == "ERR answers of more than 16 MiB"
        assert server.rss() - before < 64 * MIB
        wire.expect(b"v", "GET", "k")


def test_an_idle_queue_goes_when_others_need_its_room(tmp_path: Path):
    tiers = ("cpu://?capacity=16MiB",)
    with served(tmp_path, *tiers) as server, server.connect() as idle, server.connect() as other:
        idle.expect("OK", "MULTI")
        idle.expect("QUEUED", "SET", "k", bytes(6 * MIB))
        until(lambda: other.ask("SET", "more", bytes(6 * MIB)) == "OK")
        assert idle.ends()
