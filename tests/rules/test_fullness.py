"""What is learned from storage that says it is full, and how long it is believed."""

from __future__ import annotations

import pytest

from lmtier.rules.fullness import FULL_PAUSE, UNBOUNDED, StorageLimit


class Now:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


def test_a_job_sent_before_the_limit_may_be_sent_again(now):
    fullness = StorageLimit(now)
    assert fullness.nbytes == UNBOUNDED
    fullness.on_full(3, 4096, following=6)
    assert fullness.nbytes == 4096
    assert [fullness.is_unknown_to(job) for job in (4, 5, 6)] == [True, True, False]
    fullness.on_full(5, 8192, following=7)
    assert fullness.nbytes == 4096, "no more fits than before"


def test_a_full_job_that_knew_the_limit_means_nothing_fits(now):
    fullness = StorageLimit(now)
    fullness.on_full(3, 4096, following=6)
    fullness.on_full(6, 4096, following=7)
    assert fullness.nbytes == 0


def test_retries_pause_longer_until_something_fits(now):
    fullness = StorageLimit(now)
    fullness.on_full(1, 4096, following=2)
    pauses = []
    for job in range(2, 5):
        fullness.on_full(job, 4096, following=job + 1)
        began = now.seconds
        while fullness.is_known:
            now.seconds += FULL_PAUSE
        pauses.append(now.seconds - began)
        fullness.on_full(job, 4096, following=job)
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]
    fullness.on_fit()
    now.seconds += 1000
    fullness.on_full(9, 4096, following=10)
    now.seconds += FULL_PAUSE
    assert not fullness.is_known
