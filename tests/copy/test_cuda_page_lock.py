"""PageLock the slab: in the background, as far as the driver goes, and no copy across two registrations."""

from __future__ import annotations

import gc
import logging
import mmap
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.copy.cuda.page_lock import PageLock
from lmtier.copy.cuda.streams import Rows

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

    def page_lock(self) -> PageLock:
        return PageLock(MEMORY, self.register, self.unregister, step=STEP)


def test_all_of_it_is_pinned_in_the_background_step_by_step():
    driver = Driver()
    driver.gate.clear()
    page_lock = driver.page_lock()
    page_lock.start()
    assert not page_lock.wait(0)
    assert page_lock.locked_bytes == 0
    driver.gate.set()
    assert page_lock.wait(30)
    assert page_lock.locked_bytes == SIZE
    assert driver.ranges == {START: 100, START + 100: 100, START + 200: 100, START + 300: 50}
    page_lock.close()
    assert driver.ranges == {}
    assert page_lock.locked_bytes == 0


def test_memory_that_nobody_has_unlocked_stays_mapped():
    """Other memory at its address would be written where the driver does not look."""
    driver, memory = Driver(), mmap.mmap(-1, SIZE)
    page_lock = PageLock(memoryview(memory), driver.register, driver.unregister, step=STEP)
    page_lock.start()
    assert page_lock.wait(30)
    of_it = weakref.ref(page_lock)
    del page_lock
    gc.collect()
    assert driver.ranges
    with pytest.raises(BufferError):
        memory.close()
    left = of_it()
    assert left is not None
    left.close()
    assert driver.ranges == {}
    memory.close()
    del left
    gc.collect()
    assert of_it() is None


def test_who_cannot_wait_has_the_rest_pinned_without_pauses(monkeypatch):
    monkeypatch.setattr("lmtier.copy.cuda.page_lock._PAUSE", 1e9)  # a pause lasts for ever
    driver = Driver()
    page_lock = driver.page_lock()
    page_lock.start()
    assert not page_lock.is_whole
    page_lock.hurry()
    assert page_lock.is_whole
    assert page_lock.seconds > 0
    assert len(driver.ranges) == 4
    page_lock.close()


def test_memory_that_the_driver_refuses_stays_unpinned(caplog):
    """One line of the log says so."""
    driver = Driver(most=250)
    page_lock = driver.page_lock()
    with caplog.at_level(logging.WARNING, "lmtier"):
        page_lock.start()
        assert page_lock.wait(30)
    assert page_lock.locked_bytes == 200
    assert "out of memory" in page_lock.failure
    (line,) = caplog.messages
    assert "200 B of 350 B" in line
    assert "ulimit -l" in line
    page_lock.close()
    assert driver.ranges == {}


def test_a_batch_is_of_copies_whose_host_side_is_pinned():
    page_lock = Driver(most=250).page_lock()
    page_lock.start()
    assert page_lock.wait(30)
    assert page_lock.holds(np.array([(START + 100, 9000, 50), (9000, START + 199, 1)], np.int64))
    assert not page_lock.holds(np.array([(START + 100, 9000, 50), (9000, START + 200, 1)], np.int64))
    assert not page_lock.holds(np.array([(8000, 9000, 50)], np.int64))


def test_closing_ends_it_between_two_steps():
    driver = Driver()
    driver.gate.clear()
    page_lock = driver.page_lock()
    page_lock.start()
    page_lock._stopped.set()
    driver.gate.set()
    page_lock.close()
    assert driver.ranges == {}
    assert page_lock.locked_bytes == 0


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

    cut = Driver().page_lock().split_at_steps(np.array(copies, np.int64).reshape(-1, 3)).tolist()
    for to, source, nbytes in cut:
        assert nbytes > 0
        assert len(steps(to, nbytes)) == len(steps(source, nbytes)) == 1
    whole = [(to + i, source + i) for to, source, nbytes in copies for i in range(nbytes)]
    assert sorted((to + i, source + i) for to, source, nbytes in cut for i in range(nbytes)) == sorted(whole)


@settings(deadline=None)  # of time nothing is promised
@given(
    at=st.integers(0, SIZE - 1),
    step=st.integers(0, 70),
    width=st.integers(1, 250),
    number=st.integers(1, 6),
    is_to=st.booleans(),
)
def test_no_rows_span_two_steps_and_none_loses_a_byte(at, step, width, number, is_to):
    page_lock, ends = Driver().page_lock(), [START + each for each in (0, STEP, 2 * STEP, 3 * STEP, SIZE)]
    host, other = (START + at, width + step), (10 * START, width + 3)
    to, source = (host, other) if is_to else (other, host)
    rows = Rows(to[0], to[1], source[0], source[1], width, number)

    def bytes_of(each: Rows) -> list[tuple[int, int]]:
        starts = [(row.to, row.source) for row in (each.part(i, i + 1) for i in range(each.number))]
        return [(to + i, source + i) for to, source in starts for i in range(each.width)]

    parts = list(page_lock.parts(rows))
    assert [pair for part in parts for pair in bytes_of(part)] == bytes_of(rows)
    for part in parts:
        touched = [to if is_to else source for to, source in bytes_of(part)]
        assert len({sum(end <= address for end in ends) for address in touched}) == 1
    if width + step <= STEP and number > 1 and at + number * (width + step) <= STEP:
        assert parts == [rows]


def test_two_who_end_it_unpin_every_step_once():
    """One in the background, when another server's slab comes, and one at the end."""
    driver = Driver()
    page_lock = driver.page_lock()
    page_lock.start()
    assert page_lock.wait(30)
    inside, go_on = threading.Event(), threading.Event()
    unregister = page_lock._unregister

    def slow(at: int) -> None:
        inside.set()
        assert go_on.wait(30)
        unregister(at)

    page_lock._unregister = slow
    page_lock.leave()
    assert inside.wait(30)
    other = threading.Thread(target=page_lock.close)
    other.start()
    go_on.set()
    other.join(30)
    assert driver.ranges == {}
    assert page_lock.locked_bytes == 0
