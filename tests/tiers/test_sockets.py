"""What the sockets of tiers owe: a call ends by the time that it was given, to some milliseconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from lmtier_backends.sockets import TimedSocket
from tests.stopwatch import Stopwatch

LATE = 0.01
Act: TypeAlias = Callable[[TimedSocket, float], object]
Ends: TypeAlias = "tuple[TimedSocket, socket.socket]"


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A connection: our end, and one that nobody serves."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = TimedSocket(socket.create_connection(door.getsockname()))
        stack.callback(ours.close)
        yield ours, stack.enter_context(door.accept()[0])


def receive(ours: TimedSocket, until: float) -> None:
    ours.receive(memoryview(bytearray(9)), until)


def receive_all(ours: TimedSocket, until: float) -> None:
    room = memoryview(bytearray(1 << 20))
    while room:
        room = room[ours.receive_all([room], until) :]


def send(ours: TimedSocket, until: float) -> None:
    ours.send([bytes(32 << 20)], until)


def ends_late_by(ours: TimedSocket, act: Act, seconds: float) -> float:
    watch, until = Stopwatch(), time.monotonic() + seconds
    with pytest.raises(TimeoutError):
        act(ours, until)
    assert time.monotonic() >= until
    return watch.seconds() - seconds


@pytest.mark.alone
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.55, 1.1])
@pytest.mark.parametrize("act", [receive, receive_all, send])
def test_a_call_to_a_silent_server_ends_on_time(ends: Ends, act: Act, seconds: float) -> None:
    assert ends_late_by(ends[0], act, seconds) < LATE


@pytest.mark.alone
def test_bytes_that_come_one_by_one_do_not_extend_the_time(ends: Ends) -> None:
    ours, theirs = ends
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.004):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        assert ends_late_by(ours, receive_all, 0.55) < LATE
    finally:
        over.set()
        dripping.join()


def test_data_larger_than_kernel_buffers_arrives_in_full(ends: Ends) -> None:
    ours, theirs = ends
    sent = bytes(range(251)) * (1 << 17)
    echoing = threading.Thread(target=lambda: theirs.sendall(theirs.recv(len(sent), socket.MSG_WAITALL)))
    echoing.start()
    until = time.monotonic() + 30
    ours.send([sent], until)
    got = memoryview(bytearray(len(sent)))
    taken = 0
    while taken < len(got):
        taken += ours.receive_all([got[taken:]], until)
    echoing.join()
    assert got == sent
