"""A Mooncake Store that is away, dead or frozen costs hits, never time or bytes: each case is a miss."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from lmtier.config import TierSpec
from lmtier.errors import ConfigError
from lmtier.testing import Sample, drain, load, lookup, pages, run, sample, store
from lmtier.tiers.base import Item, Job, Op, Reason
from lmtier.tiers.registry import open_tier
from tests.faults.deadlines import DEADLINE, PATIENCE, Lateness, in_time
from tests.mooncake_process import mooncake
from tests.redis_process import free_port, within
from tests.server.process import until
from tests.stopping import stop

pytest.importorskip(
    "mooncake.store", reason="its client is for x86-64, and needs libibverbs1", exc_type=ImportError
)

SIZE = 1 << 20


def tier_of(url: str, query: str = "", deadline: float = PATIENCE) -> Any:
    return open_tier(TierSpec.parse(f"{url}&deadline={deadline}s&{query}".rstrip("&")))


def both(tier: Any, each: Sample) -> tuple[Reason | None, Reason | None]:
    """Why it could not be stored, and not be loaded; each in time, and wrong bytes never."""
    stored = in_time(tier, lambda: store(tier, each))
    return stored.failed.get(each.name), load_failure(tier, each)


def load_failure(tier: Any, each: Sample) -> Any:
    done, got = in_time(tier, lambda: load(tier, each.name, each.room))
    assert not done.ok or got == each.payload
    return done.failed.get(each.name)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake://", "which master"),
        ("mooncake://host:99999", "not a host and port"),
        ("mooncake://host?protocol=ib", "tcp or rdma"),
        ("mooncake://host?replicas=0", "1 or more"),
        ("mooncake://host?connections=0", "1 or more"),
        ("mooncake://host?deadline=0s", "more than 0"),
        ("mooncake://host?namespace=a/b", "namespace"),
        ("mooncake://host?master=x", "unknown option"),
    ],
)
def test_a_wrong_url_is_an_error_at_start(url, why):
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=why):
        open_tier(TierSpec.parse(url))
    assert not set(threading.enumerate()) - threads


@pytest.mark.alone
def test_without_a_master_it_starts_in_time_and_misses(caplog):
    url = f"mooncake://127.0.0.1:{free_port()}?local=127.0.0.1"
    with closing(within(DEADLINE + Lateness.slack, lambda: tier_of(url, deadline=DEADLINE))) as tier:
        assert "without it" in caplog.text
        assert both(tier, sample(1)) == (Reason.ERROR, Reason.ERROR)
        assert run(tier, Job(1, Op.LOOKUP, (Item(sample(1).name),))).failed == {sample(1).name: Reason.ERROR}


def test_a_lookup_of_512_is_one_question(tmp_path):
    objects = [sample(i, 1) for i in range(512)]
    with mooncake(tmp_path) as servers, closing(tier_of(servers.url())) as tier:
        assert not store(tier, *objects[:256]).failed
        assert len(lookup(tier, *(each.name for each in objects))) == 256


@pytest.mark.alone
@pytest.mark.slow
def test_a_dead_node_is_replaced_by_a_replica_or_is_a_miss(tmp_path):
    objects = [sample(i, SIZE) for i in range(12)]
    with (
        mooncake(tmp_path, nodes=2) as servers,
        closing(tier_of(servers.url(), "replicas=2", DEADLINE)) as tier,
    ):
        until(lambda: not store(tier, *objects).failed)
        servers.nodes[0].kill()
        servers.nodes[0].wait()
        reasons = [load_failure(tier, each) for each in objects]
        print(f"just after the death of one node of two: {reasons.count(None)} of {len(objects)} loaded")
        assert {*reasons} <= {None, Reason.ERROR, Reason.DEADLINE}
        # Until the master drops it. From then on each object has its other replica.
        until(lambda: [load_failure(tier, each) for each in objects] == [None] * len(objects))


@pytest.mark.alone
def test_a_stopped_node_is_given_up_and_fills_no_extent(tmp_path):
    objects = [sample(i, SIZE) for i in range(4)]
    with mooncake(tmp_path) as servers, closing(tier_of(servers.url(), "connections=1", DEADLINE)) as tier:
        until(lambda: not store(tier, *objects).failed)
        for process in (servers.nodes[0], servers.master):
            buffer = pages(SIZE)
            job = Job(1, Op.LOAD, (Item(objects[1].name, buffer),))
            stop(process.pid)
            try:
                done = in_time(tier, partial(run, tier, job))
                assert done.failed == {objects[1].name: Reason.DEADLINE}
            finally:
                process.send_signal(signal.SIGCONT)
            buffer[:] = b"\x5a" * SIZE  # another chunk's by now
            until(lambda: all(load_failure(tier, each) is None for each in objects))
            assert buffer == b"\x5a" * SIZE


@pytest.mark.alone
def test_a_master_that_dies_and_comes_back_is_used_again(tmp_path):
    each = sample(1, SIZE)
    with mooncake(tmp_path) as servers, closing(tier_of(servers.url(), deadline=DEADLINE)) as tier:
        until(lambda: both(tier, each) == (None, None))
        servers.master.kill()
        servers.master.wait()
        assert None not in both(tier, sample(2, SIZE))
        servers.start_master()
        began = time.monotonic()
        until(lambda: both(tier, sample(3, SIZE)) == (None, None))
        print(f"used again {time.monotonic() - began:.1f} s after the master came back")


def test_two_writers_of_one_name_do_not_mix(tmp_path):
    one, two = sample(1, SIZE), sample(2, SIZE)
    other = Sample(one.header, two.payload)  # the same name, other bytes
    with (
        mooncake(tmp_path) as servers,
        closing(tier_of(servers.url())) as here,
        closing(tier_of(servers.url())) as there,
    ):
        until(lambda: not store(here, sample(3, SIZE)).failed)
        buffers = [pages(one.room) for _ in range(30)]
        for i, buffer in enumerate(buffers):
            here.submit(Job(3 * i, Op.STORE, (one.item(),)))
            there.submit(Job(3 * i + 1, Op.STORE, (other.item(),)))
            there.submit(Job(3 * i + 2, Op.LOAD, (Item(one.name, buffer),)))
        done = {each.id: each for each in (*drain(here, 30, 60), *drain(there, 60, 60))}
        seen = {bytes(buffer) for i, buffer in enumerate(buffers) if done[3 * i + 2].ok}
        assert seen <= {bytes(one.payload), bytes(two.payload)}


def test_a_killed_node_gives_no_wrong_byte(tmp_path):
    objects = [sample(i, SIZE) for i in range(20)]
    with mooncake(tmp_path, nodes=2) as servers, closing(tier_of(servers.url(), deadline=DEADLINE)) as tier:
        until(lambda: not store(tier, objects[0]).failed)
        buffers = [pages(each.room) for each in objects]
        for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True)):
            tier.submit(Job(2 * i, Op.STORE, (each.item(),)))
            tier.submit(Job(2 * i + 1, Op.LOAD, (Item(each.name, buffer),)))
        servers.nodes[0].kill()
        done = {each.id: each for each in drain(tier, 40, 60)}
        wrong = sum(
            buffer != each.payload
            for i, (each, buffer) in enumerate(zip(objects, buffers, strict=True))
            if done[2 * i + 1].ok
        )
        assert wrong == 0
