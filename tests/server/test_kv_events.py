"""Routers hear over ZMQ of every chunk that comes to a server's tiers or leaves; who missed some, asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lmtier.client.client import Client
from lmtier.config import Config, ServerConfig
from lmtier.errors import ConfigError
from lmtier.format.keys import Identity, KeyChain, as_tokens, seed, state_key
from lmtier.observe.journal import Journal
from lmtier.observe.prompts import Origin, Prompts
from lmtier.server.events import Publisher, hash_of
from lmtier.server.serve import Server as Serve
from lmtier.testing import MemoryTier
from tests.client.test_client import LAYOUT, ONE, ROOM, C, Server, keys, store
from tests.server.process import PATIENCE

END = (-1).to_bytes(8, "big", signed=True)


def place_of(event: dict[str, Any]) -> str:
    """The tier of an event that names none."""
    medium = event.get("medium", "")
    return medium if medium != "STORAGE" else "disk" if event["locality"] == "LOCAL" else "memory"


def hashes(names: Iterable[bytes]) -> set[int]:
    return {*map(hash_of, names)}


class Router:
    """Follows a server as routers do: what it missed it asks for, and then believes what it is told."""

    def __init__(self, events: str, replay: str, topic: str = "") -> None:
        self.held: dict[str, set[int]] = {}
        self.stored: list[dict[str, Any]] = []
        self.cleared = 0
        self.next = 0
        self.lost = 0
        """Batches that were not remembered any more."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(events)
        self._sub.subscribe(topic)
        self._is_heard = False
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.rcvtimeo = int(PATIENCE * 1000)
        self._replay.connect(replay)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        self.catch_up()
        while not condition():
            assert time.monotonic() < end, {tier: len(keys) for tier, keys in self.held.items()}
            if self._sub.poll(100):
                self._is_heard = True
                _, number, payload = self._sub.recv_multipart()
                if int.from_bytes(number, "big") > self.next:
                    self.catch_up()
                self.learn(number, payload)
            elif not self._is_heard:  # what was sent before the subscription arrived was lost
                self.catch_up()

    def catch_up(self) -> None:
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while (frames := self._replay.recv_multipart())[2] != END:
            self.learn(*frames[2:])

    def learn(self, head: bytes, payload: bytes) -> None:
        number = int.from_bytes(head, "big")
        if number < self.next:
            return
        self.lost += number - self.next
        self.next = number + 1
        at, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        assert abs(at - time.time()) < 2 * PATIENCE
        for event in events:
            held = self.held.setdefault(event.get("ownership", place_of(event)), set())
            match event["type"]:
                case "BlockStored":
                    held |= {*event["block_hashes"]}
                    self.stored.append(event)
                case "BlockRemoved":
                    held -= {*event["block_hashes"]}
                case "AllBlocksCleared":
                    self.held.clear()
                    self.stored.clear()
                    self.cleared += 1

    def counts(self) -> dict[str, int]:
        return {tier: len(keys) for tier, keys in self.held.items()}

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def listen() -> Iterator[Callable[..., Router]]:
    routers: list[Router] = []

    def listen(server: Server, topic: str = "") -> Router:
        routers.append(Router(server.where["kv-events"], server.where["kv-replay"], topic))
        return routers[-1]

    yield listen
    for router in routers:
        router.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*tiers: str, chunks: int = 20, **serving: Any) -> Server:
        places = {name: f"ipc://{tmp_path}/{name}" for name in ("kv_events", "kv_events_replay")}
        cpu, config = f"cpu://?capacity={chunks * ROOM}", {"chunk_tokens": C}
        unix = str(tmp_path / "unix")
        servers.append(Server(tmp_path, cpu, *tiers, config=config, unix=unix, **places, **serving))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def test_a_router_knows_what_each_tier_holds(start, listen, tmp_path):
    server = start(f"disk://{tmp_path}/kv?capacity=64MiB")
    router = listen(server)
    with Client(server.path) as client:
        for number in range(40):  # more than the memory takes
            store(client, keys(4, f"prompt {number}"))
            assert client.flush()
        chunks = client.stats()["cpu"]["chunks"]
        router.until(lambda: router.counts() == {"CPU": chunks, "disk": 160})
        assert router.held["disk"] == hashes(
            key for number in range(40) for key in keys(4, f"prompt {number}")
        )
        assert {(each["medium"], each.get("ownership"), each["locality"]) for each in router.stored} == {
            *(("CPU", None, "LOCAL"), ("STORAGE", None, "LOCAL"))
        }
        client.clear()
        router.until(lambda: router.counts() == {"CPU": 0, "disk": 0})
    assert router.lost == router.cleared == 0


def test_a_router_that_listens_is_told_without_asking(start, listen):
    server = start()
    router, end = listen(server), time.monotonic() + PATIENCE
    with Client(server.path) as client:
        for number in count():  # what is sent before the subscription has arrived is lost
            assert time.monotonic() < end
            store(client, keys(1, f"prompt {number}"))
            if router._sub.poll(100):
                break
    topic, _, payload = router._sub.recv_multipart()
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert (topic, event["type"]) == (b"", "BlockStored")
    assert {*event["block_hashes"]} in [hashes(keys(1, f"prompt {each}")) for each in range(number + 1)]


def test_who_comes_late_asks_for_what_was_before(start, listen):
    server = start()
    with Client(server.path) as client:
        store(client, keys(5))
        first = listen(server)
        first.until(lambda: first.counts() == {"CPU": 5})
        second = listen(server)
        second.until(lambda: second.counts() == {"CPU": 5})


def test_what_a_disk_kept_over_a_restart_is_told_of(start, listen, tmp_path):
    tier = f"disk://{tmp_path}/kv?capacity=64MiB"
    server = start(tier)
    with Client(server.path) as client:
        store(client, keys(5))
        assert client.flush()
    server.stop()
    server.start()
    router = listen(server)
    router.until(lambda: router.counts() == {"disk": 5})
    assert router.held["disk"] == hashes(keys(5))


def test_routers_hear_tokens_and_origins_from_engines(start, listen):
    server = start()
    router = listen(server)
    identity = Identity(model="m", weights="w")
    tokens = list(range(100, 100 + 3 * C))
    plain, salted = (KeyChain(seed(identity, C, salt=salt), C, tokens).keys for salt in ("", "tenant"))
    with Client(server.path) as client:
        client.send_tokens(salted[:2], tokens[: 2 * C], Origin.of({}, "sql", "tenant"))
        client.send_tokens(salted[2:], tokens[2 * C :], Origin.of({}, "sql", "tenant"), salted[1])
        store(client, salted[:1])
        store(client, salted)
        store(client, plain)
        router.until(lambda: router.counts() == {"CPU": 6})
    first, second, unknown = router.stored
    ours, theirs = [*map(hash_of, salted)], [*map(hash_of, plain)]
    assert (first["block_hashes"], first["parent_block_hash"]) == (ours[:1], None)
    assert first["extra_keys"] == [["sql", "tenant"]]
    assert (second["block_hashes"], second["parent_block_hash"]) == (ours[1:], ours[0])
    assert (second["token_ids"], second["block_size"]) == (tokens[C:], C)
    assert (second["extra_keys"], second["lora_name"]) == ([["sql"], ["sql"]], "sql")
    assert (unknown["block_hashes"], unknown["token_ids"], unknown["extra_keys"]) == (theirs, [], None)


def test_a_topic_is_what_a_router_subscribes_to(start, listen):
    server = start(kv_events_topic="kv@pod@model")
    router, other = listen(server, "kv@pod"), listen(server, "kv@another")
    with Client(server.path) as client:
        for router_of in (router, other):
            router_of.until(lambda: True)
        store(client, keys(3))
        router.until(lambda: router.counts() == {"CPU": 3})
    assert not other._sub.poll(0)


class Owner:
    """A cache and its publisher, turned by hand."""

    def __init__(self, tmp_path: Path, *urls: str, opened: Any = None) -> None:
        from lmtier.core.cache import Cache

        config = Config(
            tiers=(f"cpu://?capacity={20 * ROOM}", *urls), chunk_tokens=C, prefault=False, load_deadline=30.0
        )
        self.cache = Cache(config, tiers=opened)
        self.prompts, self.journal = Prompts(C), Journal()
        self.cache.followers.add(self.journal)
        events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        self.publisher = Publisher(self.cache, self.journal, self.prompts, events, replay, "")
        self.router = Router(events, replay)

    def store(self, names: list[bytes]) -> None:
        reservation = self.cache.reserve(names, ONE)
        if reservation.chunks:
            self.cache.commit(reservation)
        self.cache.flush()
        self.publisher.turn()

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()
        assert not self.publisher._thread.is_alive()
        self.cache.close(timeout=5)
        self.router.close()


def test_routers_hear_of_writes_and_clears_in_asked_tiers(tmp_path):
    url = "memory://"
    tier = MemoryTier()
    tier.keeps = False
    with Owner(tmp_path, url, opened={url: tier}) as owner:
        owner.store(keys(3))
        owner.router.until(lambda: owner.router.counts() == {"CPU": 3, "memory": 3})
        assert {each["locality"] for each in owner.router.stored} == {"LOCAL", "REMOTE"}
        owner.cache.clear()
        assert owner.cache.flush()
        owner.publisher.turn()
        owner.router.until(lambda: owner.router.cleared == 1 and not owner.router.counts().get("memory"))


def test_prompts_stored_together_are_published_apart(tmp_path):
    """Nothing is published twice."""
    with Owner(tmp_path) as owner:
        prompts = [list(range(at, at + 2 * C)) for at in (0, 100, 200)]
        chains = [KeyChain(seed(Identity(model="m", weights="w"), C), C, tokens).keys for tokens in prompts]
        for keys_of, tokens in zip(chains[:2], prompts[:2], strict=True):
            owner.prompts.add(keys_of, as_tokens(tokens).tobytes(), Origin.of({}, "", ""))
        for keys_of in chains[:2]:
            owner.cache.commit(owner.cache.reserve(keys_of, ONE))
        owner.store(chains[2])
        owner.router.until(lambda: owner.router.counts() == {"CPU": 6})
        told = [(each["block_hashes"], each["token_ids"]) for each in owner.router.stored]
        first, second, third = ([*map(hash_of, chain)] for chain in chains)
        assert told == [(first, prompts[0]), (second, prompts[1]), (third, [])]


def test_what_came_before_its_parent_is_told_again_after_it(tmp_path):
    """A router may have dropped it: it did not know where it belongs."""
    with Owner(tmp_path) as owner:
        tokens = list(range(4 * C))
        chain = KeyChain(seed(Identity(model="m", weights="w"), C), C, tokens).keys
        owner.prompts.add(chain, as_tokens(tokens).tobytes(), Origin.of({}, "", ""))
        owner.store(chain)
        entry = owner.cache.index.get(chain[1])
        assert entry is not None
        owner.cache.discard(entry.key, entry.form)
        owner.store(chain)
        owner.router.until(lambda: len(owner.router.stored) == 2)
        again = owner.router.stored[1]
        assert again["block_hashes"] == [*map(hash_of, chain[1:])]
        assert (again["parent_block_hash"], again["token_ids"]) == (hash_of(chain[0]), tokens[C:])


def test_only_the_second_of_two_disks_needs_a_name(tmp_path):
    disks = [f"disk://{tmp_path}/{name}?capacity=1MiB" for name in ("a", "b")]
    with Owner(tmp_path, *disks) as owner:
        owner.store(keys(2))
        owner.router.until(lambda: owner.router.counts() == {"CPU": 2, "disk": 2, "disk-2": 2})
        assert {each.get("ownership") for each in owner.router.stored} == {None, "disk-2"}


def test_what_the_server_itself_lost_count_of_is_told_anew(tmp_path):
    with Owner(tmp_path) as owner:
        owner.store(keys(3))
        owner.router.until(lambda: owner.router.counts() == {"CPU": 3})
        for number in range(2):  # more than it remembers between two turns
            owner.journal.changed("cpu", True, [b"x" * 28 + number.to_bytes(4, "big")] * 65_536, "")
        owner.publisher.turn()
        owner.publisher.turn()
        owner.router.until(lambda: owner.router.cleared == 1 and owner.router.counts() == {"CPU": 3})


def test_chunks_gone_before_a_resend_are_not_published(tmp_path):
    with Owner(tmp_path) as owner:
        owner.store(keys(3))
        owner.publisher.resend_all()
        owner.publisher._announce()
        owner.cache.clear()
        owner.store(keys(2, "b"))
        owner.router.until(lambda: owner.router.held.get("CPU") == hashes(keys(2, "b")))
        assert sum(len(each["block_hashes"]) for each in owner.router.stored) == 2


def test_a_router_that_stops_reading_holds_nobody_up(tmp_path):
    with Owner(tmp_path) as owner:
        owner.router._sub.poll(0)
        began = time.monotonic()
        for number in range(300):
            owner.store(keys(2, f"prompt {number}"))
        assert time.monotonic() - began < PATIENCE
        owner.router.until(lambda: owner.router.counts() == {"CPU": 20})


def test_a_taken_address_is_named_and_nothing_stays_open(tmp_path):
    place = f"ipc://{tmp_path}/none/here"
    serving = ServerConfig(listen="", http="", unix=str(tmp_path / "unix"), kv_events=place)
    with pytest.raises(ConfigError, match="kv_events: cannot bind"):
        Serve(Config(tiers=("cpu://?capacity=1MiB",), prefault=False, load_deadline=30.0), serving)
    assert not (tmp_path / "unix").exists()


def test_replay_alone_is_refused():
    with pytest.raises(ConfigError, match="kv_events_replay needs kv_events"):
        ServerConfig(kv_events_replay="tcp://*:5558")


@pytest.mark.parametrize(
    "request_", [(b"",), (b"", b"short"), (b"", b"x" * 8, b"more"), (b"nothing before it",)]
)
def test_a_wrong_replay_request_goes_unanswered(tmp_path, request_):
    """The next request is answered."""
    with Owner(tmp_path) as owner:
        owner.store(keys(3))
        owner.router._replay.send_multipart(request_)
        owner.router.until(lambda: owner.router.counts() == {"CPU": 3})


def test_routers_hear_of_chunks_and_never_of_states(start, listen):
    server = start()
    router = listen(server)
    names = keys(2)
    state = state_key(names[0], LAYOUT.to_json())
    with Client(server.path) as client:
        store(client, names[:1])
        reservation = client.reserve([names[0], state], ONE, first=1)
        client.commit(reservation)
        store(client, names[1:])
        router.until(lambda: hash_of(names[1]) in router.held.get("CPU", ()))
        assert router.held["CPU"] == hashes(names)
        client.delete([state, names[1]])
        router.until(lambda: hash_of(names[1]) not in router.held["CPU"])
    assert router.held["CPU"] == hashes(names[:1])
