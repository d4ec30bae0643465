"""A cache in another process is a cache: the same calls, no payload on the socket, no harm when it dies."""

from __future__ import annotations

import gc
import hashlib
import logging
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtier.client import link as link_module
from lmtier.client.client import Client
from lmtier.copy.mover import Mover
from lmtier.copy.paging import PagedKV
from lmtier.core.grant import Grant, Match
from lmtier.errors import ConfigError, MisuseError, TierError
from lmtier.format.keys import Identity, namespace, state_key
from lmtier.format.layout import PAGE, LayerShape, Layout, Shard, form_of, padded, stored_size
from lmtier.format.objects import Selector
from lmtier.rules.worth import Cost
from lmtier.wire.command_reader import CommandReader
from lmtier.wire.resp import Error, encode
from lmtier.wire.verbs import MAX_MODELS
from tests.redis_process import running
from tests.server.process import Served, secret, until
from tests.stopping import stop
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.alone

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=4096, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
OTHER = Layout.uniform(
    layers=2, heads=2, head_dim=4096, dtype="bf16", block_tokens=4, chunk_tokens=C, packing="planes"
)
LEFT, RIGHT = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
ONE = form_of(LAYOUT, (LAYOUT.whole,))
TWO = form_of(LAYOUT, (LEFT, RIGHT))
ROOM = padded(LAYOUT.nbytes(LAYOUT.whole))
AT_ONCE = 0.1  # seconds; a call that does not wait takes far less


def keys(count: int, name: str = "a") -> list[bytes]:
    return [namespace(name) + hashlib.sha256(f"{name}{i}".encode()).digest()[4:] for i in range(count)]


def content(key: bytes, shard: Shard) -> bytes:
    size = LAYOUT.nbytes(shard)
    return (hashlib.sha256(key + str(shard).encode()).digest() * (size // 32 + 1))[:size]


def write(client: Client, reservation: Grant, *shards: Shard) -> None:
    for key, offsets in reservation.places:
        for shard in shards or reservation.form.shards:
            data = content(key, shard)
            client.slab.view(offsets[reservation.form.shards.index(shard)], len(data))[:] = data


def store(client: Client, names: list[bytes], form=ONE) -> int:
    reservation = client.reserve(names, form)
    write(client, reservation)
    for shard in form.shards if reservation.chunks else ():
        client.commit(reservation, shard)
    return len(reservation.chunks)


def is_right(client: Client, match: Match) -> bool:
    return not match.loading and all(
        client.slab.view(offset, LAYOUT.nbytes(shard)) == content(key, shard)
        for (key, offsets), form in zip(match.grant.places, match.grant.placement.forms, strict=True)
        for offset, shard in zip(offsets, form.shards, strict=True)
    )


def look(client: Client, names: list[bytes], form=ONE) -> list[str]:
    match = client.wait(client.match(names, form))
    assert match.is_ready
    assert len(match.grant.chunks) == match.chunks
    assert is_right(client, match)
    client.release(match)
    return match.sources


def lookups(server: Server) -> int:
    return int(server.report()["counted"]["lookups"])


def used(client: Client) -> int:
    return client.stats()["cpu"]["used"]


class Server(Served):
    """On a Unix socket."""

    @property
    def path(self) -> str:
        return self.where["unix"]

    def freeze(self) -> None:
        stop(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(*tiers: str, chunks: int = 20, path: str = "", **settings: object) -> Server:
        config = {"chunk_tokens": C, "verify": "always", **settings}
        path = path or str(tmp_path / f"{len(servers)}.sock")
        server = Server(tmp_path, f"cpu://?capacity={chunks * ROOM}", *tiers, config=config, unix=path)
        servers.append(server)
        return server

    yield serve
    for server in servers:
        if server.process.poll() is None:
            server.thaw()
            server.kill()


@contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, Any]]:
    """Another process, and the pipe to it."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(20), "the other process says nothing"
    return pipe.recv()


# ---- a cache in another process


def test_processes_share_payloads_without_the_socket(serve):
    server = serve(chunks=40)

    def saves(pipe: Connection) -> None:
        with Client(server.path, engine=secret("one")) as client:
            pipe.send((store(client, keys(32)), client.traffic))

    with child(saves) as (pipe, _):
        chunks, traffic = heard(pipe)
    with Client(server.path, engine=secret("other")) as client:
        assert chunks == 32
        assert look(client, keys(32)) == ["cpu"] * 32
        assert ROOM * 32 > 4_000_000 > 400 * max(traffic, client.traffic)
        client.check()


def test_more_chunks_than_a_request_may_name_are_deleted(serve):
    with Client(serve().path) as client:
        store(client, keys(3))
        client.delete([*keys(70_000, "others"), *keys(3)])
        assert look(client, keys(3)) == []


def test_a_reservation_is_a_caches(serve):
    with Client(serve(chunks=6).path) as client:
        assert store(client, keys(2)) == 2
        reservation = client.reserve(keys(9), ONE)
        assert (list(reservation.chunks), reservation.leading_stored, reservation.dropped) == (
            [2, 3, 4, 5],
            2,
            3,
        )
        client.abort(reservation)
        assert used(client) == 2 * ROOM
        skipping = client.reserve(keys(4), ONE, first=3)
        assert (list(skipping.chunks), skipping.leading_stored) == ([3], 3)


def test_chunks_of_another_engines_layout_say_so(serve):
    with Client(serve().path) as client:
        store(client, keys(2), TWO)
        store(client, keys(3), ONE)
        match = client.match(keys(3), form_of(OTHER, (OTHER.whole,)))
        assert match.grant.placement.forms == [TWO, TWO, ONE]
        assert is_right(client, match)


def test_fingerprints_come_back(serve):
    with Client(serve().path) as client:
        reservation = client.reserve(keys(3), TWO)
        client.commit(reservation, LEFT, {1: b"left" * 4})
        client.commit(reservation, RIGHT, {1: b"right" * 3, 2: b"2"})
        marks = client.match(keys(3), TWO).grant.placement.marks
        assert marks == {1: (b"left" * 4, b"right" * 3), 2: (b"", b"2")}


def test_chunks_on_disk_are_brought_into_the_slab(serve, tmp_path):
    server = serve(f"disk://{tmp_path}/kv?capacity={100 * stored_size(ROOM)}", chunks=6)
    with Client(server.path) as client:
        store(client, keys(4))
        assert client.flush()
        store(client, keys(6, "b"))
        client.flush()
        match = client.match(keys(4), ONE)
        assert (match.sources, match.grant.chunks, match.is_ready) == (["disk"] * 4, (), False)
        client.prefetch(match, 3)
        changed = 0

        def arrived() -> bool:
            nonlocal changed
            changed += client.step()
            return match.is_ready

        until(arrived)
        assert (match.sources, len(match.grant.chunks), match.cut_reason) == (["disk"] * 3, 3, "not_worth_it")
        assert is_right(client, match)
        assert client.step() == 0
        client.release(match)
        assert look(client, keys(4)) == ["cpu"] * 3 + ["disk"]
        assert client.stats()["disk"]["chunks"] == 10


def test_a_long_prompt_goes_in_pieces(serve):
    with Client(serve().path) as client:
        store(client, keys(2))
        assert look(client, keys(40_000)) == ["cpu"] * 2


def test_many_touches_alone_do_not_fill_the_socket(serve):
    with Client(serve().path) as client:
        for _ in range(3000):
            client.touch(keys(2))
        assert store(client, keys(2)) == 2


def test_everything_can_be_cleared_and_discarded(serve):
    with Client(serve().path) as client:
        store(client, keys(3))
        store(client, keys(2, "b"))
        match = client.match(keys(3), ONE)
        client.discard(match.keys[2])
        client.release(match)
        assert look(client, keys(3)) == ["cpu"] * 2
        client.clear(Selector(namespace("a")))
        assert (look(client, keys(3)), look(client, keys(2, "b"))) == ([], ["cpu"] * 2)
        client.clear(force=True)
        assert used(client) == 0


def test_a_client_clears_what_one_engine_has_stored(serve):
    path = serve().path
    with Client(path, name="good") as good, Client(path, name="bad") as bad:
        store(good, keys(3))
        store(bad, keys(2, "b"))
        for none in (Selector(by="b*", since=1 << 50), Selector(namespace("a"), by="bad")):
            good.clear(none)
        assert len(look(good, keys(2, "b"))) == 2
        good.clear(Selector(by="bad*"))
        assert (look(good, keys(3)), look(good, keys(2, "b"))) == (["cpu"] * 3, [])
        with pytest.raises(MisuseError, match="lmtier forget"):
            good.clear(Selector(tenants=frozenset({b"abcd"})))
        for more_than_meant in (Selector(by=""), Selector(until=1), Selector(by="good", until=1)):
            with pytest.raises(MisuseError, match="until now"):
                good.clear(more_than_meant)
        assert look(good, keys(3)) == ["cpu"] * 3


def test_chunks_are_deleted_by_key_in_shared_tiers(serve, tmp_path):
    with running(tmp_path / "redis") as redis:
        url = f"redis://127.0.0.1:{redis.port}"
        with Client(serve(url, chunks=4).path) as client:
            store(client, keys(3))
            assert client.flush()
            store(client, keys(4, "b"))  # takes their place in memory
            client.delete(keys(3)[1:])
            assert client.flush()
            assert look(client, keys(3)) == ["redis"]


def test_wrong_uses_raise_as_a_caches_do(serve):
    client = Client(serve().path)
    with pytest.raises(MisuseError, match="less than the 8"):
        client.match(keys(2), ONE, tokens=7)
    with pytest.raises(MisuseError, match="twice"):
        client.match(keys(1) * 2, ONE)
    reservation = client.reserve(keys(2), TWO)
    with pytest.raises(MisuseError, match="pass the one"):
        client.commit(reservation)
    client.commit(reservation, LEFT)
    with pytest.raises(MisuseError, match="committed or aborted before"):
        client.commit(reservation, LEFT)
    client.abort(reservation, RIGHT)
    match = client.match(keys(2), ONE)
    client.release(match)
    client.release(match)
    for call in (client.prefetch, client.wait):
        with pytest.raises(MisuseError, match="released"):
            call(match)
    assert used(client) == 0
    client.close()
    client.close()
    with pytest.raises(MisuseError, match="closed"):
        client.match(keys(1), ONE)


@pytest.mark.parametrize(
    "odd",
    [
        "a\nb",
        "a\r\n*1\r\n$4\r\nPING",
        "a\0",
        "x" * 129,
        "x" * (64 << 10),
        "x" * (2 << 20),
        "\udc80",
        "x\ud800",
    ],
    ids=["a line", "a command", "a NUL", "129", "64 KiB", "2 MiB", "a byte", "half a character"],
)
def test_odd_names_are_refused_and_the_connection_stays(serve, odd):
    server = serve()
    with Client(server.path) as client:
        assert store(client, keys(2)) == 2
        for words in ({"session": odd}, {"session": "s", "parent": odd}, {"source": odd}):
            with pytest.raises(MisuseError, match="printable characters"):
                client.match(keys(2), ONE, **words)
        for call in (
            lambda: client.pin(odd, keys(2)),
            lambda: client.hint({}, session=odd),
            lambda: client.hint({"actions": odd}, salt=odd),
        ):
            with suppress(MisuseError):
                call()
        assert look(client, keys(2)) == ["cpu", "cpu"]
        assert (client.lost, client.pinned()) == (0, [])
    server.check()


# ---- several processes of one engine


def test_a_client_killed_in_a_save_gives_everything_back(serve):
    server = serve()

    def saves(pipe: Connection) -> None:
        client = Client(server.path)
        client.match(keys(2), ONE)
        reservation = client.reserve(keys(7, "b"), ONE)
        client.slab.view(reservation.placement.offsets[0][0], 100)[:] = b"x" * 100
        pipe.send("half-way")
        signal.pause()

    with child(saves) as (pipe, process), Client(server.path) as client:
        heard(pipe)
        store(client, keys(2))
        assert used(client) == 9 * ROOM
        process.kill()
        until(lambda: used(client) == 2 * ROOM, seconds=5)
        assert look(client, keys(7, "b")) == []
        client.check()


def rank(pipe: Connection, address: str, shard: Shard) -> None:
    """Writes its shard of what the scheduler has reserved, when it is told to."""
    client = Client(address, engine=secret("e"), shard=shard)
    while True:
        grant = pipe.recv()
        assert client.adopt(grant, shard)
        write(client, grant, shard)
        client.commit(grant, shard)
        pipe.send("done")


def test_ranks_commit_what_their_scheduler_reserved(serve):
    """A rank that dies costs the chunks whose shard it lacks."""
    server = serve()
    left_rank, right_rank = (child(rank, server.path, shard) for shard in (LEFT, RIGHT))
    with (
        left_rank as (left, dies),
        right_rank as (right, _),
        Client(server.path, engine=secret("e")) as scheduler,
    ):
        whole, half = (scheduler.reserve(keys(3, name), TWO) for name in ("a", "b"))
        for reservation, ranks in ((whole, (left, right)), (half, (right,))):
            scheduler.disown(reservation)
            for pipe in ranks:
                pipe.send(reservation)
                assert heard(pipe) == "done"
        assert look(scheduler, keys(3), TWO) == ["cpu"] * 3
        assert used(scheduler) == 6 * ROOM
        dies.kill()
        until(lambda: used(scheduler) == 3 * ROOM, seconds=5)
        assert look(scheduler, keys(3, "b"), TWO) == []
        assert look(scheduler, keys(3), TWO) == ["cpu"] * 3


def test_a_reservation_is_adopted_only_with_its_slab(serve):
    server = serve()
    with (
        Client(server.path, engine=secret("e")) as scheduler,
        Client(server.path, engine=secret("e")) as worker,
    ):
        reservation = scheduler.reserve(keys(2), ONE)
        with pytest.raises(MisuseError, match="adopt it before"):
            worker.commit(reservation)
        server.kill()
        server.start()
        assert not worker.adopt(reservation)


# ---- a server that is not there


def outages(log: pytest.LogCaptureFixture) -> list[str]:
    words = ("is down", "is back")
    return [word for record in log.records for word in words if word in record.getMessage()]


def test_without_a_server_calls_miss_and_do_not_raise(serve, caplog):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(3))
        held = client.match(keys(3), ONE)
        unready = client.reserve(keys(2, "b"), ONE)
        server.kill()
        for _ in range(3):
            assert client.match(keys(3), ONE).chunks == 0
        reservation = client.reserve(keys(5), ONE, first=1)
        assert (reservation.chunks, reservation.leading_stored, reservation.dropped) == ((), 1, 4)
        client.commit(reservation)
        client.commit(unready)
        client.touch(keys(2))
        client.clear()
        client.check()
        assert (client.step(), client.flush(), client.stats()) == (0, False, {})
        assert is_right(client, held), "nobody writes what a dead server had"
        client.discard(held.keys[0])
        client.release(held)
        assert client.lost == 1
        assert client.unserved >= 5
    assert outages(caplog) == ["is down"]


def test_a_restarted_server_is_used_once_old_grants_end(serve, caplog):
    caplog.set_level(logging.INFO, "lmtier")
    server = serve()
    with Client(server.path) as client:
        store(client, keys(3))
        held, waiting = client.match(keys(3), ONE), client.reserve(keys(2, "b"), ONE)
        before, window = client.run_id, client.slab
        server.kill()
        server.start()
        assert client.match(keys(3), ONE).chunks == 0
        with Client(server.path) as other:
            store(other, keys(5, "other"))
        assert is_right(client, held)
        client.release(held)
        assert client.reserve(keys(3), ONE).chunks == (), "the reservation is still held"
        write(client, waiting)
        client.commit(waiting)
        assert (client.run_id, client.slab) == (before, window)
        until(lambda: client.stats())
        assert (client.run_id != before, client.slab is not window) == (True, True)
        assert look(client, keys(2, "b")) == [], "what went to the old one is not in the new one"
        assert look(client, keys(5, "other")) == ["cpu"] * 5
        assert store(client, keys(3)) == 3
        assert look(client, keys(3)) == ["cpu"] * 3
    assert outages(caplog) == ["is down", "is back"]


def test_an_idle_client_does_not_even_notice_a_restart(serve):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(3))
        server.kill()
        server.start()
        assert store(client, keys(3)) == 3
        assert (client.lost, client.unserved) == (1, 0)


def test_a_server_that_comes_back_with_other_chunks_is_none(serve, caplog):
    server = serve()
    with Client(server.path) as client:
        server.kill()
        serve(path=server.path, chunk_tokens=2 * C)
        assert client.reserve(keys(3), ONE).dropped == 3
        assert "it came back with chunk_tokens=8, not 4" in caplog.text


def test_attempts_to_reach_a_dead_server_cost_nothing(serve):
    server = serve()
    with Client(server.path) as client:
        server.kill()
        watch = Stopwatch()
        for _ in range(200):
            client.match(keys(3), ONE)
        assert watch.seconds() < 1


def test_a_stalled_server_costs_one_timeout(serve, caplog):
    """What the server grants too late is given back."""
    caplog.set_level(logging.INFO, "lmtier")
    server = serve()
    with (
        Client(server.path, timeout=0.3, engine=secret("e")) as client,
        Client(server.path, engine=secret("e")) as other,
    ):
        store(client, keys(3))
        held = client.match(keys(3), ONE)
        server.freeze()
        began = time.monotonic()
        assert client.match(keys(3), ONE).chunks == 0
        assert 0.25 < time.monotonic() - began < 2
        watch = Stopwatch()
        for _ in range(10):
            assert client.match(keys(3), ONE).chunks == 0
            assert client.reserve(keys(2, "b"), ONE).dropped == 2
        assert client.step() == 0
        assert watch.seconds() < AT_ONCE
        assert is_right(client, held)
        client.release(held)
        server.thaw()
        until(lambda: look(client, keys(3)) == ["cpu"] * 3)
        client.clear()
        until(lambda: used(other) == 0)
        assert client.lost == 0
    assert outages(caplog) == ["is down", "is back"]


def test_a_sure_miss_is_counted_without_a_round_trip(serve):
    server = serve()
    with Client(server.path) as client:
        client.match(keys(2, "form"), ONE)
        before = lookups(server)
        server.freeze()
        watch = Stopwatch()
        match = client.match(keys(5, "new"), ONE)
        assert watch.seconds() < AT_ONCE
        assert (match.is_ready, match.chunks) == (True, 0)
        with pytest.raises(MisuseError, match="twice"):
            client.match(keys(1, "new") * 2, ONE)
        server.thaw()
        store(client, keys(5, "new"))
        assert lookups(server) == before + 1
        assert look(client, keys(5, "new")) == ["cpu"] * 5


def test_after_a_restart_the_client_knows_what_is_present(serve, tmp_path):
    server = serve(f"disk://{tmp_path}/kv?capacity=64MiB", chunks=4)
    with Client(server.path) as client:
        for name in ("a", "b", "c"):
            store(client, keys(3, name))
            assert client.flush()
        assert look(client, keys(3, "a")) == ["disk"] * 3
    server.kill()
    server.start()
    with Client(server.path) as client:
        for name in ("a", "b", "c"):
            assert look(client, keys(3, name)) == ["disk"] * 3
        client.clear()
        server.freeze()
        watch = Stopwatch()
        assert not client.match(keys(3, "b"), ONE).chunks
        assert watch.seconds() < AT_ONCE
        server.thaw()


def test_commits_that_are_not_awaited_are_stored(serve, caplog):
    server = serve()
    with Client(server.path, waits=False) as client, Client(server.path) as other:
        reservation = client.reserve(keys(3), ONE)
        write(client, reservation)
        server.freeze()
        watch = Stopwatch()
        client.commit(reservation)
        assert watch.seconds() < AT_ONCE
        server.thaw()
        until(lambda: look(other, keys(3)) == ["cpu"] * 3)
        lost = client.reserve(keys(2, "b"), ONE)
        client._server.call("LMTIER.ABORT", lost.id, "*")
        client.commit(lost)
        client.stats()
    assert "refused the end of a save: NOSUCH reservation" in caplog.text


def test_a_commit_that_meets_a_stalled_server_is_not_lost(serve):
    server = serve()
    with Client(server.path, timeout=0.3) as client:
        saved, dropped, late = (client.reserve(keys(3, name), ONE) for name in ("saved", "dropped", "late"))
        write(client, saved)
        server.freeze()
        client.commit(saved)
        client.abort(dropped)
        client.abort(late)
        server.thaw()
        until(lambda: look(client, keys(3, "saved")) == ["cpu"] * 3)
        assert used(client) == 3 * ROOM


def test_a_reservation_granted_too_late_is_given_back(serve):
    server = serve()
    with (
        Client(server.path, timeout=0.3, engine=secret("e")) as client,
        Client(server.path, engine=secret("e")) as other,
    ):
        store(client, keys(1, "form"))
        server.freeze()
        assert client.reserve(keys(5), ONE).dropped == 5
        server.thaw()
        until(lambda: client.stats())
        until(lambda: used(other) == ROOM)


def test_what_is_asked_for_ahead_is_read_later(serve):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(1, "form"))
        server.freeze()
        watch = Stopwatch()
        asked = client.begin_reserve(keys(5), ONE, first=2)
        assert watch.seconds() < AT_ONCE
        server.thaw()
        until(lambda: used(client) == 4 * ROOM)  # other calls read the reply in passing
        reservation = client.finish_reserve(asked)
        assert (reservation.leading_stored, list(reservation.chunks)) == (2, [2, 3, 4])
        write(client, reservation)
        assert used(client) == 4 * ROOM


@pytest.mark.parametrize("is_answered", [False, True])
def test_an_unwanted_early_reservation_is_given_back(serve, is_answered):
    server = serve()
    with Client(server.path, engine=secret("e")) as client, Client(server.path, engine=secret("e")) as other:
        store(client, keys(1, "form"))
        if is_answered:
            asked = client.begin_reserve(keys(5), ONE)
            assert used(client) == 6 * ROOM
        else:
            server.freeze()
            asked = client.begin_reserve(keys(5), ONE)
        client.cancel_reserve(asked)
        server.thaw()
        client.stats()
        until(lambda: used(other) == ROOM)
        assert client.reserve(keys(5), ONE).dropped == 0


def test_batched_calls_go_out_together_or_before_a_wait(serve):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(1, "form"))
        before = client.traffic
        with client.batched():
            client.touch(keys(1, "form"))
            asked = client.begin_reserve(keys(2), ONE)
            assert client.traffic == before
        assert client.traffic > before
        assert client.finish_reserve(asked).chunks == (0, 1)
        with client.batched():
            asked = client.begin_reserve(keys(2, "b"), ONE)
            assert client.finish_reserve(asked).chunks == (0, 1)
        server.kill()
        with client.batched():
            client.touch(keys(1, "form"))
        assert client.lost == 1


def test_early_reservations_wait_once_for_a_stalled_server(serve):
    server = serve()
    with (
        Client(server.path, timeout=0.3, engine=secret("e")) as client,
        Client(server.path, engine=secret("e")) as other,
    ):
        store(client, keys(1, "form"))
        server.freeze()
        asked = [client.begin_reserve(keys(2, name), ONE) for name in ("a", "b")]
        assert client.finish_reserve(asked[0]).dropped == 2
        watch = Stopwatch()
        assert client.finish_reserve(asked[1]).dropped == 2
        assert watch.seconds() < AT_ONCE
        server.thaw()
        until(lambda: client.stats())
        until(lambda: used(other) == ROOM)


def test_a_dead_server_voids_its_early_reservations(serve):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(1, "form"))
        early, late, unwanted = (client.begin_reserve(keys(2, name), ONE) for name in ("a", "b", "c"))
        client.stats()  # all are answered
        server.kill()
        reservation = client.finish_reserve(early)
        write(client, reservation)
        client.commit(reservation)
        server.start()
        until(lambda: client.stats())
        assert client.finish_reserve(late).dropped == 2
        client.cancel_reserve(unwanted)
        assert used(client) == 0


def test_the_constructor_says_why_there_is_no_server(serve, tmp_path, monkeypatch):
    with pytest.raises(TierError, match=r"no lmtier server at .*/nobody.sock: No such file"):
        Client(str(tmp_path / "nobody.sock"))
    with pytest.raises(ConfigError, match="is not a path of a Unix socket"):
        Client("cache:6380")
    server = serve()
    server.kill()
    with pytest.raises(TierError, match="Connection refused"):
        Client(server.path)
    server.start()
    monkeypatch.setattr(link_module, "PROTOCOL", 2)
    with pytest.raises(TierError, match="install the same lmtier on both sides"):
        Client("unix://" + server.path)
    server.freeze()
    watch = Stopwatch()
    with pytest.raises(TierError, match="does not answer"):
        Client(server.path, timeout=0.2)
    assert watch.seconds() < 2


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"garbage\r\n",
        b"+OK\r\n+OK\r\n+OK\r\n",
        b"$-1\r\n" * 3,
        b"*2\r\n+run\r\n:1\r\n:4096\r\n",
        b"-ERR no\r\n",
    ],
)
def test_somebody_elses_server_is_refused(tmp_path, reply):
    path = str(tmp_path / "other.sock")
    listener = socket.create_server(path, family=socket.AF_UNIX)

    def answer(pipe: Connection) -> None:
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(reply)
        if reply:
            connection.recv(1000)
            signal.pause()

    with listener, child(answer), pytest.raises(TierError, match=str(tmp_path)):
        Client(path, timeout=0.5)


GREETING = {"run": 7, "protocol": 1, "chunk_tokens": C, "verify": "off", "load_deadline": 2.0}


def places(*pages: int) -> bytes:
    return b"".join(struct.pack("<Q", page * PAGE) for page in pages)


NONSENSE = [
    *(["id"], ["id", 1], [1, 2], [None] * 4, [["id"], 1], "text", 7, None, [], Error("ERR no")),
    {"id": 1, "state": "ready", "offsets": "{", "sources": "cpu*1"},
    {"id": 1, "state": "ready", "offsets": places(1, 2, 3), "sources": "cpu*3"},
    {"id": 1, "state": "ready", "offsets": places(1), "sources": "cpu"},
    {"id": 1, "state": "ready", "offsets": places(1), "sources": "cpu*1", "marks": "5:0:00"},
    {
        "id": 1,
        "state": "ready",
        "offsets": places(1),
        "sources": "cpu*1",
        "forms": "1*1",
        "other_forms": [["", "L:9"]],
    },
    {"id": 1, "known": 0, "dropped": 0, "chunks": "0-9", "offsets": places(1)},
    {"id": 1, "known": 0, "dropped": 0, "chunks": "0 5", "offsets": places(1, 2)},
]


def nonsense(pipe: Connection, listener: socket.socket) -> None:
    """Greets as a server should. A connection of name n then gets the nth of these, whatever it asks."""
    while True:
        connection, _ = listener.accept()
        commands = CommandReader(lambda *_: None)
        reply: Any = None
        while count := connection.recv_into(commands.target()):
            commands.received(count)
            while words := commands.next():
                match bytes(words[0]):
                    case b"LMTIER.HELLO":
                        reply = NONSENSE[int(bytes(words[3]))]
                        connection.sendall(encode(GREETING, False))
                    case b"LMTIER.SLAB":
                        fd = os.memfd_create("slab")
                        os.truncate(fd, PAGE)
                        socket.send_fds(connection, [encode([PAGE, 0], False)], [fd])
                        os.close(fd)
                    case b"LMTIER.FORM":
                        connection.sendall(encode(0, False))
                    case b"LMTIER.CALL":
                        connection.sendall(b"?\r\n")
                    case _:
                        connection.sendall(encode(reply, False))


def test_nonsense_replies_cost_at_most_one_connection(tmp_path):
    path = str(tmp_path / "liar.sock")
    with socket.create_server(path, family=socket.AF_UNIX) as listener, child(nonsense, listener):
        for number, each in enumerate(NONSENSE):
            with Client(path, name=str(number)) as client:
                match = client.match(keys(2), ONE)
                assert (match.chunks, match.is_ready) == (0, True), each
            with Client(path, name=str(number)) as client:
                assert client.reserve(keys(2), ONE).dropped == 2, each
            with Client(path, name=str(number)) as client:
                client.touch(keys(1))
                client.clear()
                assert client.lost == 1


def models(client: Client) -> list[tuple[str, str]]:
    told = client.call("models")
    return [(each["identity"]["weights"], bytes.fromhex(each["lora"]).decode()) for each in told]


def test_a_restarted_server_hears_only_current_adapters(serve):
    """It hears of the model too, and of no adapter of older weights."""
    server = serve()
    with Client(server.path) as client:
        client.declare(Identity(model="m", weights="old"), ONE)
        client.declare(Identity(model="m", weights="old"), ONE, "poet")
        client.declare(Identity(model="m", weights="new"), ONE)
        for number in range(MAX_MODELS + 1):
            client.declare(Identity(model="m", weights="new"), ONE, f"a{number}")
        server.kill()
        server.start()
        until(client.stats)
        assert look(client, keys(1)) == []
        assert models(client) == [*(("new", f"a{n}") for n in range(2, MAX_MODELS + 1)), ("new", "")]


def test_the_cost_of_computing_opens_no_connection(serve):
    server = serve()
    with Client(server.path, timeout=0.3) as client:
        client.costs(Cost(0.1, 0.001, 0.0, 0.0))
        server.kill()
        until(lambda: client.stats() == {} and client.lost == 1)
        unserved = client.unserved
        server.start()
        client._server._try_after = 0.0
        client.costs(Cost(0.2, 0.002, 0.0, 0.0))
        assert client._server.link.is_lost
        assert client.unserved == unserved
        assert client.stats()


def test_attempts_that_take_their_time_are_no_more_frequent(serve, tmp_path):
    server = serve()
    with Client(server.path, timeout=0.5) as client:
        server.kill()
        os.unlink(server.path)
        with socket.create_server(server.path, family=socket.AF_UNIX):  # connects, and never answers
            assert client.stats() == {}
            client._server._try_after = 0.0
            assert client.stats() == {}
            assert client._server._try_after >= time.monotonic() + 1.9


def test_hints_too_long_for_a_message_cost_no_connection(serve, caplog):
    with Client(serve().path) as client:
        store(client, keys(3))
        held = client.match(keys(3), ONE)
        for long in ({"salt": "y" * (1 << 20)}, {"session": "y" * (1 << 20)}, {}):
            client.hint({"actions": [], "x": "" if long else "\u7121" * 200_000}, **long)
        assert client.stats()
        assert client.lost == 0
        assert "hints of more than 262144 bytes are not sent" in caplog.text
        assert is_right(client, held)
        client.release(held)


def test_what_a_server_does_not_take_is_not_sent(serve):
    with Client(serve().path) as client:
        with pytest.raises(MisuseError, match="is too long: a server takes 4194304 bytes"):
            client.match(keys(140_000), ONE)
        assert look(client, keys(1)) == []
        assert client.lost == 0


def test_an_unsendable_argument_costs_only_its_call(serve):
    """Else the reply of each call would go to the one before."""
    with Client(serve().path) as client:
        store(client, keys(2))
        wrong: Any = object()
        for bad in (lambda: client.pin(wrong, keys(1)), lambda: client.match(keys(2), ONE, tokens=wrong)):
            with pytest.raises((TypeError, MisuseError)):
                bad()
            assert client.stats()
            assert look(client, keys(2)) == ["cpu"] * 2


def test_an_interrupted_call_gives_back_what_it_is_granted(serve):
    server = serve()
    with Client(server.path) as client:
        poll = client._server.link._poll
        asked = client.begin_reserve(keys(3), ONE)

        class Interrupted:
            def poll(self, _: float) -> None:
                client._server.link._poll = poll
                raise KeyboardInterrupt

        interrupted: Any = Interrupted()
        client._server.link._poll = interrupted
        with pytest.raises(KeyboardInterrupt):
            client.finish_reserve(asked)
        until(lambda: used(client) == 0)


def test_a_closed_client_keeps_no_memory_of_its_server(serve):
    """Whatever was not answered, and without a search for garbage."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("lmtier-slab")

    server = serve()
    gc.collect()
    before = mapped()
    gc.disable()
    try:
        client = Client(server.path)
        store(client, keys(3))
        held = client.match(keys(3), ONE)
        assert mapped() == before + 1
        server.freeze()
        client.release(held)
        client.close()
        del client, held
        assert mapped() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("waits", [True, False])
def test_a_reconnected_client_reports_what_ended_meanwhile(serve, waits):
    """Its session goes on meanwhile: others of the engine are connected."""
    server = serve()
    with (
        Client(server.path, engine=secret("e"), waits=waits) as client,
        Client(server.path, engine=secret("e")),
        Client(server.path) as other,
    ):
        store(client, keys(3))
        held, saving = client.match(keys(3), ONE), client.reserve(keys(5), ONE)
        write(client, saving)
        client._server.link._socket.shutdown(socket.SHUT_RDWR)
        until(lambda: not client.is_server_alive)
        client.commit(saving)
        client.release(held)
        until(client.stats)
        assert client.lost == 1
        until(lambda: look(other, keys(5)) == ["cpu"] * 5)
        other.clear()
        until(lambda: used(other) == 0)


def test_two_processes_cannot_save_one_shard_of_one_engine(serve):
    """When one of them left, the server would give away what the other one fills."""
    server = serve()
    shard = LAYOUT.whole
    with Client(server.path, engine=secret("e"), shard=shard) as first:
        saving = first.reserve(keys(2), ONE)
        with pytest.raises(TierError, match="each engine needs its own secret"):
            Client(server.path, engine=secret("e"), shard=shard)
        write(first, saving)
        first.commit(saving)
        assert look(first, keys(2)) == ["cpu"] * 2
    with Client(server.path, engine=secret("e"), shard=shard) as again:
        assert again.stats()


def test_a_server_that_takes_nothing_fills_no_memory(serve):
    server = serve()
    with Client(server.path) as client:
        server.freeze()
        for number in range(1500):
            client.release(client.match(keys(40, f"new{number}"), ONE))
        assert client._server.link.unsent < 2 << 20
        server.thaw()
        until(client.stats)


# ---- forks


def test_a_forked_child_connects_apart_from_its_parent(serve):
    server = serve()
    with Client(server.path) as client:
        store(client, keys(3))
        held = client.match(keys(3), ONE)

        def works(pipe: Connection) -> None:
            assert is_right(client, held)
            client.release(held)
            pipe.send((look(client, keys(3)), store(client, keys(2, "b")), client.lost))
            os._exit(0)

        with child(works) as (pipe, process):
            assert heard(pipe) == (["cpu"] * 3, 2, 0)
            process.join()
        client.clear()
        assert used(client) == 3 * ROOM, "the parent's leases are its own"
        assert is_right(client, held)
        client.release(held)
        client.clear()
        assert used(client) == 0


# ---- movers


class Engine:
    """Two layers of paged KV with random content."""

    def __init__(self, client: Client, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = [torch.randn(40, 2, 2, 16, generator=generator).bfloat16() for _ in range(2)]
        layout = Layout.uniform(
            layers=2, heads=2, head_dim=8, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
        )
        kv = PagedKV(layout, layout.whole, self.layers)
        self.mover = Mover(client, kv, Identity(model="m", weights="w"), spare_blocks=range(30, 40))

    def save(self, tokens: list[int], blocks: list[int]) -> int:
        with self.mover.save(self.mover.chain(tokens), blocks) as saving:
            for layer in range(2):
                saving.layer(layer)
        return saving.tokens

    def load(self, tokens: list[int], blocks: list[int]) -> int:
        with self.mover.load(self.mover.match(self.mover.chain(tokens)), blocks) as loading:
            loading.all()
            return loading.finish()

    def bytes_of(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([layer[blocks] for layer in self.layers]).view(torch.int16)


def test_a_mover_works_with_a_client_as_with_a_cache(serve):
    server = serve()
    with Client(server.path) as ones, Client(server.path) as others:
        one, other = Engine(ones, 1), Engine(others, 2)
        tokens, blocks, target = list(range(21)), list(range(10)), list(range(10, 20))
        assert one.save(tokens, blocks) == 20
        assert one.save(tokens, blocks) == 0
        assert other.load(tokens, target) == 20
        assert torch.equal(one.bytes_of(blocks), other.bytes_of(target))
        assert (others._server.compared, others._server.differing) == (5, 0)
        server.kill()
        assert other.load(tokens, target) == 0
        assert other.save(list(range(100, 121)), blocks) == 0


def test_a_mover_deletes_what_came_back_wrong(serve):
    server = serve()
    with Client(server.path) as client:
        engine = Engine(client, 1)
        tokens, blocks, target = list(range(21)), list(range(10)), list(range(10, 20))
        engine.save(tokens, blocks)
        match = engine.mover.match(engine.mover.chain(tokens))
        client.slab.view(match.grant.placement.offsets[2][0], 1)[0] ^= 1
        client.release(match)
        assert engine.load(tokens, target) == 2 * C
        assert client._server.differing == 1
        assert engine.load(tokens, target) == 2 * C, "it is gone"
        assert client._server.differing == 1
        assert server.report()["counted"]["differed"] == 1


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lmtier")


def test_a_prefix_ends_at_a_state_and_brings_it(serve, tmp_path):
    layout = Layout((LayerShape(1, 5000, 0),), "u8", C, C, "state")
    state = form_of(layout, (layout.whole,))
    server = serve(f"disk://{tmp_path}/kv?capacity=16MiB")
    names = keys(4)
    end = state_key(names[2], layout.to_json())
    with Client(server.path) as client:
        store(client, names)
        assert client.match(names, ONE, state_form=state).chunks == 0
        reservation = client.reserve([names[2], end], state, first=1)
        client.slab.view(reservation.placement.offsets[0][0], 5000)[:] = b"s" * 5000
        client.commit(reservation)
        assert client.flush()
    server.kill()
    server.start()
    with Client(server.path) as client:
        match = client.wait(client.match(names, ONE, state_form=state))
        assert is_right(client, match)
        assert match.sources == ["disk"] * 3
        assert match.grant.state is not None
        ((key, offsets),) = match.grant.state.places
        assert (key, match.is_ready) == (end, True)
        assert client.slab.view(offsets[0], 5000) == b"s" * 5000
        client.release(match)
        client.check()
