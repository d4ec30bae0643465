"""What the lanes of a library that knows no deadlines owe: whatever a call does, its lane comes back."""

from __future__ import annotations

import threading
import time

import pytest

from lmtier_backends.mooncake.call_threads import CallThreads
from tests.memory_flags import memory_flags
from tests.server.process import PATIENCE


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_a_call_that_begins_too_late_gives_its_lane_back():
    lanes = CallThreads("test", 1)
    for _ in range(3):
        goes_on = threading.Event()
        with pytest.raises(TimeoutError, match="did not answer"), lanes.lend(soon()) as lane:
            lane.run(goes_on.wait, time.monotonic() - 1)
        goes_on.set()
    with lanes.lend(soon()) as lane:
        assert lane.run(lambda: 1, soon()) == 1
    assert lanes.close()


def test_a_call_that_hangs_keeps_its_lane_until_it_returns():
    """Its memory stays as well."""
    lanes, goes_on = CallThreads("test", 1), threading.Event()
    with lanes.lend(soon()) as lane:
        lane.take_memory(100)
    with pytest.raises(TimeoutError, match="did not answer"), lanes.lend(soon()) as lane:
        lane.run(goes_on.wait, time.monotonic() + 0.01)
    with pytest.raises(TimeoutError), lanes.lend(time.monotonic() + 0.01):
        pass
    assert len(lane.memory) >= 100
    goes_on.set()
    with lanes.lend(soon()) as again:
        assert again is lane
    assert lanes.close()


def test_a_call_that_fails_says_so_and_gives_its_lane_back():
    lanes = CallThreads("test", 1)
    with pytest.raises(ZeroDivisionError), lanes.lend(soon()) as lane:
        lane.run(lambda: 1 // 0, soon())
    with lanes.lend(soon()) as lane:
        assert lane.run(lambda: 1, soon()) == 1
    assert lanes.close()


def test_what_a_lane_carries_is_in_no_core_dump():
    lanes = CallThreads("test", 1)
    with lanes.lend(soon()) as lane:
        lane.take_memory(10_000)
        assert "dd" in memory_flags(lane.address), "the kernel's word for: do not dump"
    assert lanes.close()
