"""MULTI, EXEC, DISCARD, WATCH: commands of one client that are run together, or not at all.

    MULTI ─► the following commands are queued, and their values are put into drafts
    WATCH ─► EXEC runs nothing if one of these names has changed since
    EXEC  ─► runs the queue once no other transaction uses its names; other commands with these names wait

A command may have to wait for a tier, and other clients have turns meanwhile. The names keep them apart. A
transaction that has begun always runs to its end, also if its client leaves. Its answers are stored until
then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from types import GeneratorType
from typing import Any, NamedTuple, TypeAlias

from lmtier.errors import size_text
from lmtier.server.commands import (
    ALREADY_SENT,
    NO_ROOM,
    OK,
    PAUSE,
    Argument,
    Caller,
    Command,
    Payload,
    PendingAnswer,
    Refused,
    Table,
    error_of,
)
from lmtier.server.ledger import WATCHED_NAME_OVERHEAD
from lmtier.server.values import Draft, Values, Watch
from lmtier.wire.command_reader import DROP
from lmtier.wire.resp import Error, NullArray, Simple, encode

MAX_QUEUE = 16 << 20
"""The most bytes of the queued commands of one client. Values are in the slab."""
MAX_ANSWERS = 16 << 20
"""The most bytes of answers that a transaction collects. Values that it reads are in the slab."""
_EACH = 256  # overhead in bytes of a command or an answer
_TURN = 0.004  # seconds

QUEUED = Simple("QUEUED")
ABORTED = Error("EXECABORT Transaction discarded because of previous errors.")
_AT_ONCE = {b"MULTI", b"EXEC", b"DISCARD", b"WATCH", b"QUIT", b"RESET"}


Answers: TypeAlias = "deque[bytes | Payload]"


class _Step(NamedTuple):
    command: Command
    args: list[Argument]
    drafts: list[Draft]


@dataclass(eq=False, slots=True)
class MultiQueue:
    """The commands of a client since MULTI."""

    steps: list[_Step] = field(default_factory=list)
    nbytes: int = 0
    is_aborted: bool = False
    """One of its commands was refused, so EXEC is refused too."""


@dataclass(eq=False, slots=True)
class _Transaction:
    caller: Caller
    steps: list[_Step]
    watch: Watch | None
    names: set[bytes]
    writes_any_name: bool
    """It may write any name, as FLUSHALL does."""
    number: int
    asked: int
    """The bytes of its commands, and of what is watched for it."""
    run: Generator[bytes | None, None, None] | None = None
    answers: Answers = field(default_factory=deque)
    nbytes: int = 0
    is_done: bool = False
    was_cancelled: bool = False
    """It did not run, because a watched name had changed."""
    has_no_reader: bool = False
    """Its client has left, so its answers are dropped."""

    def conflicts_with(self, names: Iterable[bytes], is_of_all: bool) -> bool:
        return self.writes_any_name or is_of_all or not self.names.isdisjoint(names)


class Transactions:
    """All transactions. Only the server's loop calls it."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._waiting: list[_Transaction] = []
        self._running: list[_Transaction] = []
        self._writing: set[bytes] = set()
        """The names of writes that have begun."""
        self._turns: dict[int, set[bytes] | None] = {}
        """The names of each write that waits for others, by its number, the first one first. None: all."""
        self._numbers = count()
        """Numbers writes that wait and transactions as they come. None with names waits for a later one."""
        self.goes_on = False
        """Some transactions can continue at once."""

    def table(self) -> Table:
        flags = ("loading", "stale", "fast")
        return {
            b"MULTI": Command(self._multi, 1, flags),
            b"EXEC": Command(self._exec, 1, ("loading", "stale")),
            b"DISCARD": Command(self._discard, 1, flags),
            b"WATCH": Command(self._watch, -2, flags, (1, -1, 1)),
            b"UNWATCH": Command(self._unwatch, 1, flags),
        }

    @property
    def are_running(self) -> bool:
        return bool(self._running or self._waiting)

    def held_bytes(self, caller: Caller) -> int:
        """The bytes of what is queued, watched and answered for a client."""
        nbytes = 0 if caller.multi_queue is None else caller.multi_queue.nbytes
        if caller.watch is not None:
            nbytes += WATCHED_NAME_OVERHEAD * len(caller.watch.keys)
        transaction: _Transaction | None = caller.transaction
        return nbytes if transaction is None else nbytes + transaction.asked + transaction.nbytes

    # ---- called by the server for each command

    def must_queue(self, caller: Caller, name: bytes) -> bool:
        """Whether this command is queued for EXEC."""
        return caller.multi_queue is not None and name not in _AT_ONCE

    def queue_command(self, caller: Caller, name: bytes, command: Command, args: list[Argument]) -> object:
        queue: MultiQueue = caller.multi_queue
        if queue.is_aborted:
            return QUEUED
        error: Error | None = None
        queue.nbytes += sum(_EACH // 4 + (len(arg) if isinstance(arg, bytes) else 0) for arg in args) + _EACH
        if name.startswith(b"LMTIER."):
            error = Error("ERR Command not allowed inside a transaction")
        elif any(arg is DROP for arg in args):
            error = NO_ROOM
        elif queue.nbytes > MAX_QUEUE:
            error = Error(f"ERR the commands of a transaction take {size_text(MAX_QUEUE)} at most here")
        if error is not None:
            self.mark_aborted(caller)
            return error
        queue.steps.append(_Step(command, args, caller.drafts))
        caller.drafts = []
        return QUEUED

    def mark_aborted(self, caller: Caller) -> None:
        """A command was refused."""
        if caller.multi_queue is not None:
            self._drop(caller.multi_queue.steps)
            caller.multi_queue.is_aborted = True

    def run(self, caller: Caller, command: Command, args: list[Argument]) -> Any:
        """The answer of a command, or a generator that waits for it.

        A command waits for transactions that run with one of its names. A write also waits for writes that
        came before it, and for transactions that wait.
        """
        is_write = "write" in command.flags
        if self._running or (is_write and (self._writing or self._turns or self._waiting)):
            names, number = set(_names(command, args)), next(self._numbers)
            if (names or command.writes_any_name) and self._must_wait(command, names, number):
                return self._wait_then_start(caller, command, args, names, number)
        return self._start(caller, command, args)

    def alone(self, steps: PendingAnswer) -> PendingAnswer:
        """Run what may delete any name, as FLUSHALL does."""
        command = Command(lambda *_: steps, 1, ("write",), writes_any_name=True)
        started: PendingAnswer = self.run(Caller(0, ""), command, [])
        return started

    def _must_wait(self, command: Command, names: set[bytes], number: int) -> bool:
        """Whether one of these names is in use now or, before a write, waited for since before `number`."""
        if "write" in command.flags:
            is_written = not self._writing.isdisjoint(names)
            if is_written or self._is_waited_for(names, number):
                return True
            earlier = (each for each in self._waiting if each.number < number)
            if any(each.conflicts_with(names, command.writes_any_name) for each in earlier):
                return True
        return any(each.conflicts_with(names, command.writes_any_name) for each in self._running)

    def _is_waited_for(self, names: set[bytes], number: int, *, is_of_all: bool = False) -> bool:
        """Whether a write that came before `number` waits to write one of these names."""
        for write_number, write_names in self._turns.items():  # the first one first
            if write_number >= number:
                return False
            if is_of_all or write_names is None or not write_names.isdisjoint(names):
                return True
        return False

    def _wait_then_start(
        self, caller: Caller, command: Command, args: list[Argument], names: set[bytes], number: int
    ) -> PendingAnswer:
        if "write" in command.flags:
            self._turns[number] = None if command.writes_any_name else names
        try:
            while self._must_wait(command, names, number):
                yield None
        finally:
            self._turns.pop(number, None)
        answer = self._start(caller, command, args)
        return (yield from answer) if isinstance(answer, GeneratorType) else answer

    def _start(self, caller: Caller, command: Command, args: list[Argument]) -> Any:
        """A write that has to wait keeps other writes off its names: what it has read must stay true."""
        answer = command.handler(caller, args)
        if not isinstance(answer, GeneratorType) or "write" not in command.flags or not command.keys[0]:
            return answer
        try:
            part = next(answer)
        except StopIteration as stop:
            return stop.value
        return self._hold(set(_names(command, args)), part, answer)

    def _hold(self, names: set[bytes], first: bytes | Payload | None, rest: PendingAnswer) -> PendingAnswer:
        self._writing |= names
        try:
            with closing(rest):
                yield first
                return (yield from rest)
        finally:
            self._writing -= names

    def drop_client(self, caller: Caller) -> None:
        """The client has left, or was reset: drop everything of it except a running transaction."""
        queue, caller.multi_queue = caller.multi_queue, None
        if queue is not None:
            self._drop(queue.steps)
        self._forget_watch(caller)

    # ---- the commands

    def _multi(self, caller: Caller, args: list[Argument]) -> object:
        if caller.multi_queue is not None:
            return Error("ERR MULTI calls can not be nested")
        caller.multi_queue = MultiQueue()
        return OK

    def _discard(self, caller: Caller, args: list[Argument]) -> object:
        if caller.multi_queue is None:
            return Error("ERR DISCARD without MULTI")
        self.drop_client(caller)
        return OK

    def _watch(self, caller: Caller, args: list[Argument]) -> object:
        if caller.multi_queue is not None:
            return Error("ERR WATCH inside MULTI is not allowed")
        watch: Watch = caller.watch or Watch()
        caller.watch = watch
        self._values.watch(watch, map(bytes, args[1:]))
        return OK

    def _unwatch(self, caller: Caller, args: list[Argument]) -> object:
        self._forget_watch(caller)
        return OK

    def _forget_watch(self, caller: Caller) -> None:
        watch, caller.watch = caller.watch, None
        if watch is not None:
            self._values.unwatch(watch)

    def _exec(self, caller: Caller, args: list[Argument]) -> object:
        queue, caller.multi_queue = caller.multi_queue, None
        if queue is None:
            return Error("ERR EXEC without MULTI")
        if queue.is_aborted:
            self._forget_watch(caller)
            return ABORTED
        watch, caller.watch = caller.watch, None
        names = {name for step in queue.steps for name in _names(step.command, step.args)}
        is_of_all = any(step.command.writes_any_name for step in queue.steps)
        nbytes = queue.nbytes + (WATCHED_NAME_OVERHEAD * len(watch.keys) if watch is not None else 0)
        transaction = _Transaction(caller, queue.steps, watch, names, is_of_all, next(self._numbers), nbytes)
        caller.transaction = transaction
        self._waiting.append(transaction)
        self.turn()
        return self._answers(transaction)

    def _answers(self, transaction: _Transaction) -> PendingAnswer:
        try:
            while not transaction.is_done:
                yield None
            if transaction.was_cancelled:
                return NullArray
            yield b"*%d\r\n" % len(transaction.steps)
            while transaction.answers:
                yield transaction.answers.popleft()
            return ALREADY_SENT
        finally:
            transaction.has_no_reader = True
            transaction.caller.transaction = None
            _let_go(transaction.answers)

    # ---- running them

    def turn(self) -> None:
        """Begin the transactions that may begin, and continue running ones, for the time of one turn."""
        still_waiting: list[_Transaction] = []
        for each in self._waiting:
            if (
                each.has_no_reader
            ):  # its client left before it began, and nothing counts any more what it holds
                self._drop(each.steps)
                if each.watch is not None:
                    self._values.unwatch(each.watch)
                continue
            is_written = not self._writing.isdisjoint(each.names) or (
                each.writes_any_name and bool(self._writing)
            )
            is_waited_for = self._is_waited_for(each.names, each.number, is_of_all=each.writes_any_name)
            ahead = (*self._running, *still_waiting)
            if (
                is_written
                or is_waited_for
                or any(other.conflicts_with(each.names, each.writes_any_name) for other in ahead)
            ):
                still_waiting.append(each)  # later transactions with the same names must not overtake it
            else:
                self._begin(each)
        self._waiting = still_waiting
        self.goes_on, turn_end = False, time.monotonic() + _TURN
        for each in list(self._running):
            assert each.run is not None
            for part in each.run:
                if part is None:
                    break
                if time.monotonic() > turn_end:
                    self.goes_on = True
                    break
            else:
                each.is_done, each.run = True, None
                self._running.remove(each)
        if self._waiting and not (self._running or self._writing):
            self.goes_on = True

    def _begin(self, transaction: _Transaction) -> None:
        watch = transaction.watch
        if watch is not None:
            transaction.was_cancelled = self._values.has_changed(watch)
            self._values.unwatch(watch)
        if transaction.was_cancelled:
            self._drop(transaction.steps)
            transaction.is_done = True
        else:
            transaction.run = self._run(transaction)
            self._running.append(transaction)

    def _run(self, transaction: _Transaction) -> Generator[bytes | None, None, None]:
        for step in transaction.steps:
            answers = yield from self._answers_of(transaction.caller, step)
            self._drop_drafts(step)
            nbytes = sum(_EACH + (len(answer) if isinstance(answer, bytes) else 0) for answer in answers)
            if transaction.nbytes + nbytes > MAX_ANSWERS:
                _let_go(answers)
                answers.append(encode(Error(f"ERR answers of more than {size_text(MAX_ANSWERS)}"), False))
            transaction.nbytes += nbytes
            transaction.answers += answers
            if transaction.has_no_reader:
                _let_go(transaction.answers)
            yield PAUSE

    def _answers_of(self, caller: Caller, step: _Step) -> Generator[bytes | None, None, Answers]:
        """Run a command, and collect its answer piece by piece."""
        answers: Answers = deque()
        # A command with values gets its own drafts. A command that changes its caller gets the caller.
        step_caller = replace(caller, drafts=step.drafts) if step.command.payloads else caller
        try:
            answer = step.command.handler(step_caller, step.args)
            if isinstance(answer, GeneratorType):
                running = answer
                while True:
                    try:
                        part = next(running)
                    except StopIteration as stop:
                        answer = stop.value
                        break
                    if part is None or part is PAUSE:
                        yield part
                    else:
                        answers.append(part)
        except (Refused, OSError) as failure:
            answer = error_of(failure)
        except GeneratorExit:
            _let_go(answers)
            raise
        if answer is not ALREADY_SENT:
            answers.append(answer if isinstance(answer, Payload) else encode(answer, caller.resp3))
        return answers

    def close(self) -> None:
        """Drop the unfinished transactions."""
        for transaction in (*self._running, *self._waiting):
            if transaction.run is not None:
                transaction.run.close()
            self._drop(transaction.steps)
            _let_go(transaction.answers)
        self._running.clear()
        self._waiting.clear()

    def _drop(self, steps: list[_Step]) -> None:
        for step in steps:
            self._drop_drafts(step)
        steps.clear()

    def _drop_drafts(self, step: _Step) -> None:
        while step.drafts:
            self._values.discard_draft(step.drafts.pop())


def _names(command: Command, args: list[Argument]) -> list[bytes]:
    first, last, step = command.keys
    return [bytes(arg) for arg in args[first : len(args) if last < 0 else last + 1 : step]] if first else []


def _let_go(answers: Answers) -> None:
    while answers:
        answer = answers.popleft()
        if isinstance(answer, Payload):
            answer.on_sent()
