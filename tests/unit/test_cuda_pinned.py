"""Pinning the slab: in the background, as far as the driver goes, and no copy across two registrations."""

from __future__ import annotations

import logging
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmtier.cuda.pinned import Pinning
from lmtier.cuda.streams import Rows

STEP, SIZE = 100, 350
MEMORY = memoryview(bytearray(SIZE))
START = np.frombuffer(MEMORY, np.uint8).ctypes.data


class Driver:
    """What is registered, and how much it lets."""

    def __init__(self, most: int = SIZE) -> None:
        self.most, self.ranges = most, dict[int, int]()
        self.gate = threading.Event()
        self.gate.set()

    def register(self, at: int, nbytes: int) -> None:
        assert self.gate.wait(30)
        if sum(self.ranges.values()) + nbytes > self.most:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        assert at not in self.ranges
        self.ranges[at] = nbytes

    def unregister(self, at: int) -> None:
        del self.ranges[at]

    def pinning(self) -> Pinning:
        return Pinning(MEMORY, self.register, self.unregister, step=STEP)


def test_all_of_it_is_pinned_in_the_background_step_by_step():
    driver = Driver()
    driver.gate.clear()
    pinning = driver.pinning()
    pinning.start()
    assert not pinning.wait(0)
    assert pinning.pinned_bytes == 0
    driver.gate.set()
    assert pinning.wait(30)
    assert pinning.pinned_bytes == SIZE
    assert driver.ranges == {START: 100, START + 100: 100, START + 200: 100, START + 300: 50}
    pinning.close()
    assert driver.ranges == {}
    assert pinning.pinned_bytes == 0


def test_who_cannot_wait_has_the_rest_pinned_without_pauses(monkeypatch):
    monkeypatch.setattr("lmtier.cuda.pinned._PAUSE", 1e9)  # a pause lasts for ever
    driver = Driver()
    pinning = driver.pinning()
    pinning.start()
    assert not pinning.is_whole
    pinning.hurry()
    assert pinning.is_whole
    assert pinning.seconds > 0
    assert len(driver.ranges) == 4
    pinning.close()


def test_where_the_driver_refuses_the_rest_stays_as_it_is_and_one_line_says_so(caplog):
    driver = Driver(most=250)
    pinning = driver.pinning()
    with caplog.at_level(logging.WARNING, "lmtier"):
        pinning.start()
        assert pinning.wait(30)
    assert pinning.pinned_bytes == 200
    assert "out of memory" in pinning.failure
    (line,) = caplog.messages
    assert "200 of 350 bytes" in line
    assert "ulimit -l" in line
    pinning.close()
    assert driver.ranges == {}


def test_a_batch_is_of_copies_whose_host_side_is_pinned():
    pinning = Driver(most=250).pinning()
    pinning.start()
    assert pinning.wait(30)
    assert pinning.holds(np.array([(START + 100, 9000, 50), (9000, START + 199, 1)], np.int64))
    assert not pinning.holds(np.array([(START + 100, 9000, 50), (9000, START + 200, 1)], np.int64))
    assert not pinning.holds(np.array([(8000, 9000, 50)], np.int64))


def test_closing_ends_it_between_two_steps():
    driver = Driver()
    driver.gate.clear()
    pinning = driver.pinning()
    pinning.start()
    pinning._stopped.set()
    driver.gate.set()
    pinning.close()
    assert driver.ranges == {}
    assert pinning.pinned_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(START, START + SIZE - 40), st.integers(5000, 6000), st.integers(0, 960)),
            st.one_of(st.integers(START, START + SIZE - 40), st.integers(5000, 6000), st.integers(0, 960)),
            st.integers(1, 500),
        )
    )
)
def test_no_copy_spans_two_steps_and_none_loses_a_byte(copies):
    def steps(at: int, nbytes: int) -> set[int]:
        ends = [START + STEP, START + 2 * STEP, START + 3 * STEP, START, START + SIZE]
        return {sum(each <= address for each in ends) for address in (at, at + nbytes - 1)}

    cut = Driver().pinning().cut(np.array(copies, np.int64).reshape(-1, 3)).tolist()
    for to, source, nbytes in cut:
        assert nbytes > 0
        assert len(steps(to, nbytes)) == len(steps(source, nbytes)) == 1
    whole = [(to + i, source + i) for to, source, nbytes in copies for i in range(nbytes)]
    assert sorted((to + i, source + i) for to, source, nbytes in cut for i in range(nbytes)) == sorted(whole)


@given(
    at=st.integers(0, SIZE - 1),
    step=st.integers(0, 70),
    width=st.integers(1, 250),
    number=st.integers(1, 6),
    is_to=st.booleans(),
)
def test_no_rows_span_two_steps_and_none_loses_a_byte(at, step, width, number, is_to):
    pinning, ends = Driver().pinning(), [START + each for each in (0, STEP, 2 * STEP, 3 * STEP, SIZE)]
    host, other = (START + at, width + step), (10 * START, width + 3)
    to, source = (host, other) if is_to else (other, host)
    rows = Rows(to[0], to[1], source[0], source[1], width, number)

    def bytes_of(each: Rows) -> list[tuple[int, int]]:
        starts = [(row.to, row.source) for row in (each.part(i, i + 1) for i in range(each.number))]
        return [(to + i, source + i) for to, source in starts for i in range(each.width)]

    parts = list(pinning.parts(rows))
    assert [pair for part in parts for pair in bytes_of(part)] == bytes_of(rows)
    for part in parts:
        touched = [to if is_to else source for to, source in bytes_of(part)]
        assert len({sum(end <= address for end in ends) for address in touched}) == 1
    if width + step <= STEP and number > 1 and at + number * (width + step) <= STEP:
        assert parts == [rows]


def test_two_who_end_it_unpin_every_step_once():
    """One in the background, when another server's slab comes, and one at the end."""
    driver = Driver()
    pinning = driver.pinning()
    pinning.start()
    assert pinning.wait(30)
    inside, go_on = threading.Event(), threading.Event()
    unregister = pinning._unregister

    def slow(at: int) -> None:
        inside.set()
        assert go_on.wait(30)
        unregister(at)

    pinning._unregister = slow
    pinning.leave()
    assert inside.wait(30)
    other = threading.Thread(target=pinning.close)
    other.start()
    go_on.set()
    other.join(30)
    assert driver.ranges == {}
    assert pinning.pinned_bytes == 0
