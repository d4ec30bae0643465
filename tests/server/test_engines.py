"""What engines may say to a server, and that nothing of theirs outlives them."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.grant import Grant
from lmtier.format.keys import namespace, state_key, value_key
from lmtier.format.layout import LayerShape, Layout, Shard, form_of, padded, stored_size
from lmtier.server.access import Role
from lmtier.server.commands import PAUSE, Caller, Refused, WithDescriptors
from lmtier.server.engines import EngineVerbs
from lmtier.server.ledger import KEY_OVERHEAD, OBJECT_OVERHEAD
from lmtier.testing import Gate, MemoryTier, SlowTier
from lmtier.tiers.base import Tier
from lmtier.wire.reply_reader import ReplyReader
from lmtier.wire.resp import Error, encode
from lmtier.wire.verbs import MAX_MODELS, RemoteMatch, read_match
from lmtier_backends.null import NullTier
from tests.server.process import secret
from tests.stopwatch import Stopwatch

C = 4
LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=128, dtype="bf16", block_tokens=2, chunk_tokens=C, packing="token"
)
OTHER = Layout.uniform(
    layers=2, heads=2, head_dim=128, dtype="bf16", block_tokens=4, chunk_tokens=C, packing="planes"
)
WHOLE, LEFT, RIGHT = LAYOUT.whole, Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
ROOM = padded(LAYOUT.nbytes(WHOLE))


def keys(count: int, name: str = "a") -> list[bytes]:
    return [namespace(name) + hashlib.sha256(f"{name}{i}".encode()).digest()[4:] for i in range(count)]


class Connection:
    """Says commands to a server's table and reads the replies as a client would see them."""

    numbers = 0

    def __init__(self, engines: EngineVerbs, *hello: str, is_local: bool = True) -> None:
        self.engines = engines
        Connection.numbers += 1
        self.caller = Caller(Connection.numbers, "here", is_local=is_local, role=Role.ADMIN)
        if hello:
            assert self.say("HELLO", 1, *hello) is not None

    def say(self, verb: str, *words: bytes | str | int) -> Any:
        value = self.ask(verb, *words)
        until = time.monotonic() + 10
        while isinstance(value, GeneratorType):
            assert time.monotonic() < until, f"{verb} waits for ever"
            value = self.resume(value)
        return self.read(value)

    def ask(self, verb: str, *words: bytes | str | int) -> Any:
        """The handler's own answer: a value, or a generator of one."""
        arguments: list[bytes | memoryview] = [
            word if isinstance(word, bytes) else str(word).encode() for word in words
        ]
        command = self.engines.table()[f"LMTIER.{verb}".encode()]
        count = len(arguments) + 1
        assert count == command.arity or command.arity < 0 <= count + command.arity, "arity"
        return command.handler(self.caller, [verb.encode(), *arguments])

    def call(self, path: str, **arguments: Any) -> Any:
        """The answer to a call of the JSON API; if it is refused, the error."""
        answer = self.say("CALL", path, json.dumps(arguments))
        return answer if isinstance(answer, Error) else json.loads(answer)

    def resume(self, waiting: Any) -> Any:
        self.engines.cache._wait(time.monotonic() + 0.05)
        self.engines.cache.step()
        try:
            next(waiting)
            return waiting
        except StopIteration as end:
            return end.value
        except Refused as refused:
            return refused.error

    def read(self, value: Any) -> Any:
        replies = ReplyReader()
        replies.feed(encode(value.value if isinstance(value, WithDescriptors) else value, False))
        reply: Any = replies.next()
        is_map = isinstance(reply, list) and isinstance(value, dict)
        return (
            {name.decode(): each for name, each in zip(reply[::2], reply[1::2], strict=True)}
            if is_map
            else reply
        )

    def form(self, layout: Layout = LAYOUT, *shards: Shard) -> Any:
        return self.say("FORM", layout.to_json(), *map(str, shards or (layout.whole,)))

    def store(self, names: list[bytes], *shards: Shard) -> int:
        """Save what is new; the number of chunks that were."""
        reply = self.say("RESERVE", self.form(LAYOUT, *shards), 0, b"".join(names))
        for shard in (shards or (WHOLE,)) if reply["id"] else ():
            assert self.say("COMMIT", reply["id"], str(shard)) == "OK"
        return len(numbers(reply["chunks"]))

    def match(self, names: list[bytes], *shards: Shard, deadline: int = 5000) -> Any:
        return self.say("MATCH", self.form(LAYOUT, *shards), 0, deadline, b"".join(names))

    def close(self) -> None:
        self.engines.on_disconnect(self.caller)


def offsets(reply: dict[str, Any]) -> list[int]:
    return [offset for (offset,) in struct.iter_unpack("<Q", reply["offsets"])]


def numbers(text: bytes) -> list[int]:
    parts = [part.split("-") for part in text.decode().split()]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def leased(cache: Cache) -> int:
    return sum(1 for entry in cache.index.entries() if entry.leases)


@pytest.fixture
def make() -> Iterator[Any]:
    caches: list[Cache] = []

    def make(
        chunks: int = 20, *tiers: str, opened: dict[str, Tier] | None = None, **options: Any
    ) -> EngineVerbs:
        config = Config(
            tiers=(f"cpu://?capacity={chunks * ROOM}", *tiers), chunk_tokens=C, prefault=False, **options
        )
        cache = Cache(config, tiers=opened, shared=True)
        caches.append(cache)
        return EngineVerbs(cache)

    yield make
    for cache in caches:
        cache.check()
        cache.close(timeout=5)


@pytest.fixture
def engines(make) -> Any:
    return make()


def below(gate: Gate, *chains: list[bytes]) -> dict[str, Any]:
    """Arguments for an engine room whose slab is empty; the chains rest in a tier behind the gate."""
    url = f"memory://?capacity={100 * stored_size(ROOM)}"
    objects: dict[Any, bytes] = {}
    config = Config(tiers=(f"cpu://?capacity={20 * ROOM}", url), chunk_tokens=C, prefault=False)
    with Cache(config, tiers={url: MemoryTier(objects)}) as cache:
        for chain in chains:
            Connection(EngineVerbs(cache), "NAME", "before").store(chain)
        cache.flush()
    return {"url": url, "opened": {url: SlowTier(MemoryTier(objects), gate)}}


# ---- who is there


def test_a_greeting_says_what_an_engine_must_know(engines):
    said = Connection(engines).say(
        "HELLO", 1, "ENGINE", secret("vllm-0"), "SHARD", "L0-2H0-1", "NAME", "rank 0"
    )
    assert (said["protocol"], said["chunk_tokens"], said["capacity"]) == (1, C, 20 * ROOM)
    assert (said["verify"], float(said["load_deadline"]), said["slab"]) == (b"sample", 2.0, 1)


def test_a_lookup_without_a_wait_counts_and_holds_nothing(engines):
    engine, metrics = Connection(engines, "ENGINE", secret("e")), engines.cache.metrics
    assert engine.store(keys(2)) == 2
    for names in (keys(2, "new"), keys(2)):  # the second came just then
        assert engine.say("MATCH", engine.form(), 3 * C, "-", b"".join(names)) == "OK"
        assert leased(engines.cache) == 0
    engines.cache.step()
    assert metrics.value("lmtier_asked_tokens_total") == 6 * C
    assert isinstance(engine.say("MATCH", engine.form(), C, "-", b"".join(keys(2))), Error)


def test_another_version_is_told_what_to_do(engines):
    said = Connection(engines).say("HELLO", 2)
    assert said == (
        "LMTIERVERSION this server speaks 1, the client asked for 2: install the same lmtier on both sides"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("x",),
        (-1,),
        (1, "ENGINE"),
        (1, "ENGINE", ""),
        (1, "ENGINE", "a\nb"),
        (1, "NAME", "x" * 129),
        (1, "SHARD", "L0-2"),
        (1, "COLOUR", "red"),
        (1, "NAME", b"\xff"),
    ],
)
def test_a_greeting_that_means_nothing_begins_no_session(engines, words):
    connection = Connection(engines)
    assert connection.say("HELLO", *words).startswith("ERR ")
    assert connection.say("POLL", 1).startswith("NOSESSION send LMTIER.HELLO 1 first")
    connection.close()


def test_a_connection_greets_once(engines):
    assert (
        Connection(engines, "ENGINE", secret("a")).say("HELLO", 1, "ENGINE", secret("b")).startswith("MISUSE")
    )


def test_the_slab_is_handed_out_on_a_unix_socket_only(engines):
    answer = Connection(engines).ask("SLAB")
    assert answer == WithDescriptors([20 * ROOM, 1], (engines.cache.slab.fd, engines.cache.presence.fd))
    assert Connection(engines, is_local=False).say("HELLO", 1)["slab"] == 0


def test_a_private_slab_cannot_be_handed_out(tmp_path):
    config = Config(tiers=(f"cpu://?capacity={ROOM}",), chunk_tokens=C, prefault=False)
    with Cache(config) as cache:
        assert "--unix PATH" in Connection(EngineVerbs(cache)).say("SLAB")


# ---- save and load


def test_what_one_engine_saved_another_finds(engines):
    one, other = Connection(engines, "ENGINE", secret("one")), Connection(engines, "ENGINE", secret("other"))
    assert one.store(keys(5)) == 5
    found = other.match(keys(5) + keys(3, "unseen"))
    assert (found["state"], found["sources"]) == (b"ready", b"cpu*5")
    assert offsets(found) == [engines.cache.index.get(key).offsets[0] for key in keys(5)]
    assert other.store(keys(7)) == 2


def test_a_reservation_says_what_is_known_new_and_dropped(make):
    connection = Connection(make(6), "NAME", "x")
    connection.store(keys(2))
    reply = connection.say("RESERVE", connection.form(), 0, b"".join(keys(9)))
    assert (reply["known"], reply["dropped"], reply["chunks"]) == (2, 3, b"2-5")
    assert len(offsets(reply)) == 4
    assert connection.say("RESERVE", connection.form(), 0, b"".join(keys(2)))["id"] == 0


def test_a_person_can_ask_with_hexadecimal_keys(engines):
    connection = Connection(engines, "NAME", "person")
    connection.store(keys(3))
    found = connection.say("MATCH", 0, 0, 2000, *(key.hex() for key in keys(3)))
    assert found["sources"] == b"cpu*3"


def test_a_form_has_one_number_in_a_session(engines):
    one, same = Connection(engines, "ENGINE", secret("e")), Connection(engines, "ENGINE", secret("e"))
    assert [one.form(), one.form(LAYOUT, LEFT, RIGHT), same.form(LAYOUT, LEFT, RIGHT), same.form()] == [
        0,
        1,
        1,
        0,
    ]
    assert Connection(engines, "NAME", "x").form(LAYOUT, LEFT, RIGHT) == 0


def test_a_session_has_so_many_forms_and_no_more(engines):
    connection = Connection(engines, "NAME", "x")
    for heads in range(1, 65):
        layout = Layout.uniform(
            layers=1, heads=heads, head_dim=1, dtype="u8", block_tokens=1, chunk_tokens=C, packing="token"
        )
        assert connection.form(layout) == heads - 1
    assert connection.form() == "ERR a session has at most 64 forms"


def test_a_chunk_in_another_form_comes_with_its_description(engines):
    writer, reader = Connection(engines, "NAME", "w"), Connection(engines, "NAME", "r")
    writer.store(keys(2), LEFT, RIGHT)
    writer.store(keys(3))
    found = reader.say("MATCH", reader.form(OTHER), 0, 2000, b"".join(keys(3)))
    assert (found["sources"], found["forms"]) == (b"cpu*3", b"1*2 2*1")
    two, one = found["other_forms"]
    assert two == [LAYOUT.to_json(), f"{LEFT}:{ROOM // 2}".encode(), f"{RIGHT}:{ROOM // 2}".encode()]
    assert one == [LAYOUT.to_json(), f"{WHOLE}:{ROOM}".encode()]
    assert len(offsets(found)) == 5


def test_fingerprints_travel_with_their_chunks(engines):
    connection = Connection(engines, "NAME", "x")
    reply = connection.say("RESERVE", connection.form(LAYOUT, LEFT, RIGHT), 0, b"".join(keys(3)))
    connection.say("COMMIT", reply["id"], str(LEFT), 1, "ab" * 16)
    connection.say("COMMIT", reply["id"], str(RIGHT), 1, "cd" * 16, 2, "ef" * 16)
    found = connection.match(keys(3), LEFT, RIGHT)
    assert found["marks"].decode().split() == [
        f"1:0:{'ab' * 16}",
        f"1:1:{'cd' * 16}",
        f"2:1:{'ef' * 16}",
    ]


def test_the_leases_of_a_match_end_with_its_release(engines):
    connection = Connection(engines, "NAME", "x")
    connection.store(keys(3))
    found = connection.match(keys(3))
    assert leased(engines.cache) == 3
    for _ in range(2):
        assert connection.say("RELEASE", found["id"], 12345) == "OK"
    assert leased(engines.cache) == 0
    assert connection.say("POLL", found["id"]).startswith("NOSUCH")


def test_a_wait_ends_when_the_chunks_have_come(make):
    gate = Gate()
    lower = below(gate, keys(3))
    engines = make(20, lower["url"], opened=lower["opened"])
    gate.hold()
    connection = Connection(engines, "NAME", "x")
    found = connection.match(keys(3))
    assert (found["state"], found["sources"], found["offsets"]) == (b"found", b"memory*3", b"")
    waiting = connection.ask("POLL", found["id"], "WAIT")
    assert isinstance(waiting, GeneratorType)
    next(waiting)
    assert connection.say("POLL", found["id"])["loading"] == b"0-2"
    gate.open()
    while isinstance(waiting, GeneratorType):
        waiting = connection.resume(waiting)
    assert connection.read(waiting)["state"] == b"ready"
    assert "loading" not in connection.read(waiting)


DELETIONS: list[tuple[Any, ...]] = [
    ("CALL", "/api/clear", '{"force": true}'),
    ("DISCARD", b"".join(keys(3))),
]


@pytest.mark.parametrize("deletion", DELETIONS, ids=lambda each: each[0])
def test_what_is_deleted_while_it_comes_is_not_readable(make, deletion):
    """A tier still writes to its room, and nothing has verified it."""
    gate = Gate()
    lower = below(gate, keys(3))
    engines = make(20, lower["url"], opened=lower["opened"])
    gate.hold()
    connection, other = Connection(engines, "NAME", "x"), Connection(engines, "NAME", "y")
    number = connection.match(keys(3))["id"]
    connection.say("PREFETCH", number)
    other.say(*deletion)
    said = connection.say("POLL", number)
    match = RemoteMatch(tuple(keys(3)), 0.0, grant=Grant.of_nothing(form_of(LAYOUT, (WHOLE,))))
    assert not read_match(match, said).is_ready
    assert match.loading[0] == 0
    gate.open()
    assert not read_match(match, connection.say("POLL", number, "WAIT")).grant.chunks
    assert match.is_ready


def test_a_wait_ends_at_the_deadline_of_its_match(make):
    gate = Gate()
    lower = below(gate, keys(3))
    engines = make(20, lower["url"], opened=lower["opened"])
    gate.hold()
    connection = Connection(engines, "NAME", "x")
    watch = Stopwatch()
    found = connection.say("POLL", connection.match(keys(3), deadline=100)["id"], "WAIT")
    assert watch.seconds() < 2
    assert (found["state"], found["sources"], found["cut"]) == (b"ready", b"", b"deadline")
    gate.open()
    engines.cache.flush()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_wait_ends_when_another_releases_the_match(make, keeps):
    """Also while tiers that must be asked have not answered yet."""
    gate = Gate()
    lower = below(gate, keys(3))
    lower["opened"][lower["url"]].keeps = keeps
    engines = make(20, lower["url"], opened=lower["opened"])
    gate.hold()
    one, other = Connection(engines, "ENGINE", secret("e")), Connection(engines, "ENGINE", secret("e"))
    found = one.match(keys(3))
    waiting = one.ask("POLL", found["id"], "WAIT")
    next(waiting)
    other.say("RELEASE", found["id"])
    assert one.resume(waiting).startswith("NOSUCH")
    gate.open()
    engines.cache.flush()
    assert leased(engines.cache) == 0


def test_a_part_of_what_was_found_can_be_prefetched(make):
    lower = below(Gate(), keys(4))
    engines = make(20, lower["url"], opened=lower["opened"])
    connection = Connection(engines, "NAME", "x")
    found = connection.match(keys(4))
    assert connection.say("PREFETCH", found["id"], 2)["sources"] == b"memory*2"
    found = connection.say("POLL", found["id"], "WAIT")
    assert (found["state"], found["sources"], found["cut"]) == (b"ready", b"memory*2", b"not_worth_it")


# ---- sessions


def test_a_session_belongs_to_its_connections_alone(engines):
    scheduler, rank = Connection(engines, "ENGINE", secret("e")), Connection(engines, "ENGINE", secret("e"))
    stranger = Connection(engines, "ENGINE", secret("f"))
    reply = scheduler.say("RESERVE", scheduler.form(), 0, b"".join(keys(2)))
    assert stranger.say("COMMIT", reply["id"], str(WHOLE)).startswith("NOSUCH")
    assert rank.say("COMMIT", reply["id"], str(WHOLE)) == "OK"
    found = scheduler.match(keys(2))
    assert stranger.say("POLL", found["id"]).startswith("NOSUCH")
    stranger.say("RELEASE", found["id"])
    assert leased(engines.cache) == 2
    rank.say("RELEASE", found["id"])
    assert leased(engines.cache) == 0


def test_without_a_name_a_session_is_a_connections_own(engines):
    one, other = Connection(engines, "NAME", "same"), Connection(engines, "NAME", "same")
    one.store(keys(1))
    assert other.say("POLL", one.match(keys(1))["id"]).startswith("NOSUCH")


def test_an_engines_last_connection_ends_all_it_holds(engines):
    one, other = Connection(engines, "ENGINE", secret("e")), Connection(engines, "ENGINE", secret("e"))
    one.store(keys(3))
    one.match(keys(3))
    one.say("RESERVE", one.form(LAYOUT, LEFT, RIGHT), 0, b"".join(keys(3, "b")))
    one.close()
    assert leased(engines.cache) == 6, "others of this engine may still be copying"
    other.close()
    assert leased(engines.cache) == 0
    assert engines.cache.slab.used == 3 * ROOM
    engines.cache.clear()
    assert engines.cache.slab.used == 0


def test_an_engine_that_comes_back_begins_anew(engines):
    before = Connection(engines, "ENGINE", secret("e"))
    number = before.say("RESERVE", before.form(), 0, b"".join(keys(2)))["id"]
    before.close()
    again = Connection(engines, "ENGINE", secret("e"))
    assert again.say("COMMIT", number, str(WHOLE)).startswith("NOSUCH")
    assert again.match(keys(2))["sources"] == b""


def test_a_rank_that_dies_costs_only_its_unfinished_shard(engines):
    scheduler = Connection(engines, "ENGINE", secret("e"))
    left = Connection(engines, "ENGINE", secret("e"), "SHARD", str(LEFT))
    right = Connection(engines, "ENGINE", secret("e"), "SHARD", str(RIGHT))
    form = scheduler.form(LAYOUT, LEFT, RIGHT)
    done, half, none = (
        scheduler.say("RESERVE", form, 0, b"".join(keys(2, name)))["id"] for name in ("done", "half", "none")
    )
    for number, ranks in ((done, (LEFT, RIGHT)), (half, (LEFT,))):
        for shard in ranks:
            assert left.say("COMMIT", number, str(shard)) == "OK"
    left.close()
    assert engines.cache.slab.used == 6 * ROOM, "the other rank is still writing"
    right.say("COMMIT", half, str(RIGHT))
    assert right.say("COMMIT", none, str(RIGHT)) == "OK"
    assert engines.cache.slab.used == 4 * ROOM
    for name, chunks in (("done", 2), ("half", 2), ("none", 0)):
        assert len(offsets(scheduler.match(keys(2, name), LEFT, RIGHT))) == 2 * chunks


def test_an_abort_of_all_that_is_left_gives_the_room_back(engines):
    connection = Connection(engines, "NAME", "x")
    number = connection.say("RESERVE", connection.form(LAYOUT, LEFT, RIGHT), 0, b"".join(keys(4)))["id"]
    assert connection.say("ABORT", number, "*") == "OK"
    assert engines.cache.slab.used == 0
    assert connection.say("ABORT", number, "*").startswith("NOSUCH")


def test_ids_of_another_run_of_the_server_name_nothing(make):
    one, other = make(), make()
    before, after = Connection(one, "ENGINE", secret("e")), Connection(other, "ENGINE", secret("e"))
    stale = before.say("RESERVE", before.form(), 0, b"".join(keys(2)))["id"]
    fresh = after.say("RESERVE", after.form(), 0, b"".join(keys(2)))["id"]
    assert stale != fresh
    assert after.say("COMMIT", stale, str(WHOLE)).startswith("NOSUCH")


# ---- the whole cache


def test_what_is_not_believed_is_deleted_everywhere(make):
    lower = below(Gate(), keys(3))
    engines = make(20, lower["url"], opened=lower["opened"])
    connection = Connection(engines, "NAME", "x")
    connection.say("RELEASE", connection.say("POLL", connection.match(keys(1))["id"], "WAIT")["id"])
    assert connection.say("DISCARD", keys(1)[0].hex(), *keys(3)[2:]) == "OK"
    assert connection.match(keys(1))["sources"] == b""
    assert connection.match(keys(3)[1:])["sources"] == b"memory*1"


def test_one_model_can_be_cleared(engines):
    connection = Connection(engines, "NAME", "x")
    connection.store(keys(2, "llama"))
    connection.store(keys(2, "qwen"))
    assert connection.call("/api/clear", model="llama") == {}
    assert connection.match(keys(2, "llama"))["sources"] == b""
    held = connection.match(keys(2, "qwen"))
    assert held["sources"] == b"cpu*2"
    connection.call("/api/clear", prefix=namespace("qwen").hex())
    assert engines.cache.slab.used == 2 * ROOM, "leased"
    connection.call("/api/clear", force=True)
    connection.say("RELEASE", held["id"])
    assert engines.cache.slab.used == 0


def test_a_flush_ends_when_all_is_written_or_time_is_over(make):
    gate = Gate()
    lower = below(gate)
    engines = make(20, lower["url"], opened=lower["opened"])
    gate.hold()
    connection = Connection(engines, "NAME", "x")
    connection.store(keys(3))
    assert connection.say("FLUSH", 60) == 0
    gate.open()
    assert connection.say("FLUSH", 5000) == 1


def test_comparisons_are_counted_where_the_metrics_are(engines):
    Connection(engines, "NAME", "x").say("RELEASE", "VERIFIED", 5, 1)
    assert engines.cache.metrics.value("lmtier_verified_total") == 5
    assert engines.cache.metrics.value("lmtier_verify_failures_total") == 1


def test_adapters_do_not_push_their_own_model_out(engines):
    engine = Connection(engines, "ENGINE", secret("a"))
    form = LAYOUT.to_json(), str(WHOLE)
    model, other = (f'{{"model": "{name}", "weights": "w"}}' for name in "mn")
    for identity in (other, model):
        assert engine.say("FORM", *form, "MODEL", identity, "") == 0
    for number in range(MAX_MODELS + 6):
        assert engine.say("FORM", *form, "MODEL", model, f"adapter {number}") == 0
    told = [
        (each["identity"]["model"], bytes.fromhex(each["lora"]).decode())
        for each in engine.call("/api/models")
    ]
    assert len(told) == MAX_MODELS
    assert told[-1] == ("m", "")
    assert told[0] == ("m", "adapter 7")


def test_books_that_do_not_agree_are_an_error(engines):
    connection = Connection(engines)
    assert connection.call("/api/check") == {}
    engines.cache.slab.used += 1
    assert connection.call("/api/check").startswith("BROKEN an invariant of the cache does not hold")
    engines.cache.slab.used -= 1


def test_statistics_say_what_each_tier_holds(engines):
    connection = Connection(engines, "NAME", "x")
    connection.store(keys(2))
    (tier,) = connection.call("/api/stats")["tiers"]
    assert (tier["tier"], tier["chunks"], tier["used"], tier["capacity"]) == ("cpu", 2, 2 * ROOM, 20 * ROOM)


def test_a_prefix_that_the_engine_had_itself_stays_young(make):
    connection = Connection(make(4), "NAME", "x")
    connection.store(keys(2, "old"))
    connection.store(keys(2, "new"))
    connection.say("SEEN", b"".join(keys(2, "old")))
    connection.store(keys(1, "more"))
    assert connection.match(keys(2, "old"))["sources"] == b"cpu*2"


# ---- wrong uses


@pytest.mark.parametrize(
    ("verb", "words", "error"),
    [
        ("FORM", (b"{}", "L0-2H0-2"), "ERR not a layout"),
        ("FORM", (LAYOUT.to_json(), "everything"), "ERR 'everything' is not a shard"),
        ("FORM", (LAYOUT.to_json(), "L0-9H0-2"), "ERR shard L0-9H0-2 is empty or outside"),
        ("FORM", (LAYOUT.to_json(), "L0-2H0-2", "L0-1H0-1"), "ERR shard L0-2H0-2 overlaps"),
        ("FORM", (LAYOUT.to_json(), *["L0-2H0-2"] * 257), "ERR a form has at most 256 shards"),
        ("FORM", (b" " * 3841, "L0-2H0-2"), "ERR a layout of 3841 bytes of JSON: the header of an object"),
        ("FORM", (LAYOUT.to_json().replace(b"[2,2,", b"[1e999,2,"), "L0-2H0-2"), "ERR not a layout"),
        ("FORM", (LAYOUT.to_json().replace(b"[2,2,", b"[2,%s," % (b"9" * 400)), "L0-2H0-2"), "ERR a chunk"),
        ("MATCH", (7, 0, 100, b""), "NOSUCH form 7"),
        ("MATCH", (0, "many", 100, b""), "ERR 'many' is not a number of tokens"),
        ("MATCH", (0, 0, 1 << 62, b""), "ERR 4611686018427387904 is more than"),
        ("MATCH", (0, 1 << 62, 0, b""), "ERR 4611686018427387904 is more than 1099511627776, the most for a"),
        ("MATCH", (0, 0, 100, b"x" * 33), "ERR keys have 32 bytes, or 64 hex digits; got 33"),
        ("MATCH", (0, 3, 100, b"".join(keys(2))), "MISUSE tokens=3 is less than the 8"),
        ("MATCH", (0, 3, 100, state_key(keys(1)[0], b"{}")), "MISUSE tokens=3 is more than the 0"),
        ("MATCH", (0, 0, 100, b"".join(keys(2) + keys(1))), "MISUSE a key occurs twice"),
        (
            "FORM",
            (LAYOUT.to_json(), str(WHOLE), "MODEL", b'{"model": "\\ud800"}', ""),
            "ERR an identity is JSON",
        ),
        (
            "TELL",
            (b'{"identity": {}, "lora": "\\ud800", "salt": ""}', b"", b"", b""),
            "ERR an origin is JSON",
        ),
        ("COST", ("0", "1e308", "0", "0"), "ERR"),
        ("MATCH", (0, 0, 100, value_key(b"name")), "MISUSE a key belongs to a named value"),
        ("MATCH", (0, 0, 100, b"x" * 32 * 65_537), "ERR 65537 keys: at most 65536"),
        ("RESERVE", (0, -1, keys(1)[0]), "ERR '-1' is not a number of chunks"),
        ("RESERVE", (0, 0, value_key(b"name")), "MISUSE a key belongs to a named value"),
        ("RESERVE", (1, 0, keys(1)[0]), "NOSUCH form 1"),
        ("PREFETCH", (99,), "NOSUCH match 99"),
        ("POLL", (99, "WAIT"), "NOSUCH match 99"),
        ("RELEASE", ("it",), "ERR 'it' is not a match"),
        ("COMMIT", (99, "*"), "NOSUCH reservation 99"),
        ("ABORT", ("9" * 30, "*"), f"ERR '{'9' * 30}' is not a reservation"),
        ("CALL", ("/api/nothing",), "ERR there is no such call; there are /api/stats, "),
        *(
            ("CALL", (path, text), error)
            for path, text, error in (
                (
                    "/api/clear",
                    '{"everything": 1}',
                    "ERR /api/clear takes model, prefix, ",
                ),
                ("/api/clear", '{"prefix": "xyz"}', "ERR prefix='xyz' is not hexadecimal"),
                ("/api/clear", '{"prefix": "%s"}' % ("00" * 33), "ERR prefix has 1 to 32 bytes"),
                ("/api/clear", '{"prefix": ""}', "ERR prefix has 1 to 32 bytes"),
                ("/api/clear", '{"prefix": "00", "model": "x"}', "ERR model and prefix do not go together"),
                ("/api/clear", '{"model": "\\ud800"}', "ERR an argument is no text"),
                ("/api/set", '{"settings": {"a": ' + "[" * 900 + "]" * 900 + "}}", "ERR settings are names"),
                ("/api/unpin", '{"name": ' + '{"settings":' * 900 + "1" + "}" * 901, "ERR name is text, not"),
                (
                    "/api/prefetch",
                    '{"keys": [], "identity": ' + '{"a":' * 900 + "1" + "}" * 901,
                    "ERR an identity is JSON",
                ),
                (
                    "/api/prefetch",
                    '{"identity": {"model": "x"}, "lora": "ff", "keys": []}',
                    "ERR an argument is no text",
                ),
                ("/api/clear", '{"stored_by": ""}', "ERR stored_by needs the name of an engine"),
                ("/api/clear", '{"since": ""}', "ERR since is a whole number, not ''"),
                ("/api/clear", '{"since": -1}', "ERR since=-1 is too large, or negative"),
                ("/api/clear", '{"since": true}', "ERR since is a whole number, not True"),
                ("/api/clear", '{"force": 1}', "ERR force is true or false, not 1"),
                ("/api/clear", '{"seconds": NaN}', "ERR seconds=nan is too large, or negative"),
                ("/api/clear", '{"seconds": 1e300}', "ERR seconds=1e+300 is too large, or negative"),
                ("/api/clear", '{"seconds": 90000}', "ERR seconds=90000 is more than a day"),
                ("/api/clear", "[]", "ERR the arguments of /api/clear are a JSON object"),
                ("/api/clear", "{", "ERR the arguments of /api/clear are a JSON object"),
                ("/api/clear", "[" * 200_000, "ERR the arguments of /api/clear are a JSON object"),
                ("/api/clear", " " * 262_145, "ERR the arguments of /api/clear have at most 262144 bytes"),
                ("/api/pin", '{"name": "x"}', "ERR /api/pin takes name, keys, seconds: missing a required "),
                ("/api/pin", '{"name": "x", "keys": ["ab"]}', "ERR a key has 64 hexadecimal digits"),
                ("/api/pin", '{"name": "x", "keys": [7]}', "ERR a key has 64 hexadecimal digits"),
                ("/api/pin", json.dumps({"name": "x", "keys": 32 * ["ab " * 21 + " "]}), "ERR a key has 64 "),
                ("/api/pin", '{"name": "x", "keys": {}}', "ERR keys is a list, not {}"),
                ("/api/pin", '{"name": "\\n", "keys": []}', "ERR a name has 1 to "),
                ("/api/pin", '{"name": "x", "keys": [], "seconds": 0}', "MISUSE ttl=0"),
                ("/api/prefetch", '{"identity": {"model": "x"}, "keys": []}', "NOSUCH no engine has sent"),
                ("/api/prefetch", '{"identity": {"mode": "x"}, "keys": []}', "ERR an identity is JSON"),
            )
        ),
        (
            "TELL",
            ('{"identity": {}, "lora": "", "salt": "%s"}' % ("x" * 16384), b"", b"", b""),
            "ERR an origin",
        ),
        ("FLUSH", ("soon",), "ERR 'soon' is not a timeout"),
        ("RELEASE", ("VERIFIED", 1, -1), "ERR '-1' is not a number of chunks"),
        ("DISCARD", (b"short",), "ERR keys have 32 bytes"),
    ],
)
def test_a_wrong_use_is_answered_and_changes_nothing(engines, verb, words, error):
    connection = Connection(engines, "NAME", "x")
    connection.form()
    connection.store(keys(2))
    said = connection.say(verb, *words)
    assert isinstance(said, Error)
    assert said.startswith(error)
    assert leased(engines.cache) == 0
    connection.call("/api/clear")
    assert engines.cache.slab.used == 0


def test_one_request_reserves_a_bounded_number_of_chunks(make, monkeypatch):
    monkeypatch.setattr("lmtier.server.engines.transfers.MAX_RESERVED", 5)
    engines = make(20)
    connection = Connection(engines, "NAME", "x")
    connection.form()
    for known in (0, 5, 10):
        said = connection.say("RESERVE", 0, 0, b"".join(keys(12)))
        assert (said["known"], said["dropped"]) == (known, max(0, 12 - known - 5))
        connection.say("COMMIT", said["id"], "*")
    dropped = engines.cache.metrics.value("lmtier_dropped_tokens_total", tier="cpu", reason="too_many")
    assert dropped == (7 + 2) * C


def test_others_have_turns_during_a_large_clear_or_discard(make):
    engines = make(3000)
    connection = Connection(engines, "NAME", "x")
    connection.form()
    connection.store(keys(3000))
    many = b"".join(keys(100))
    for verb, words, left in (("DISCARD", [many], 2900), ("CALL", [b"/api/clear"], 0)):
        answer = engines.table()[f"LMTIER.{verb}".encode()].handler(connection.caller, [b"", *words])
        assert next(answer) is PAUSE
        assert len(engines.cache.index) > left
        assert connection.read(_end(answer)) in ("OK", b"{}")
        assert len(engines.cache.index) == left


def _end(answer: Any) -> Any:
    while True:
        try:
            next(answer)
        except StopIteration as stop:
            return stop.value


def test_the_keys_of_all_matches_of_a_session_are_bounded(engines, monkeypatch):
    monkeypatch.setattr(
        "lmtier.server.engines.engine_sessions.MAX_SESSION_BYTES", 3 * OBJECT_OVERHEAD + 5 * KEY_OVERHEAD
    )
    connection = Connection(engines, "NAME", "x")
    connection.form()
    number = connection.say("MATCH", 0, 0, 100, b"".join(keys(3)))["id"]
    said = connection.say("MATCH", 0, 0, 100, b"".join(keys(3, "b")))
    assert said.startswith("ERR the matches and reservations of this session take 3.547 KiB: end some")
    connection.say("RELEASE", number, number)
    assert connection.say("MATCH", 0, 0, 100, b"".join(keys(5)))["id"]
    assert connection.say("MATCH", 0, 0, 100, keys(1)[0]).startswith("ERR the matches and reservations")


def test_too_many_clears_in_a_tier_that_hangs_are_refused(make):
    gate = Gate()
    gate.hold()
    engines = make(20, "null://", opened={"null://": SlowTier(NullTier(), gate)})
    connection = Connection(engines, "NAME", "x")
    answers = [connection.call("/api/clear", model=f"model {n}") for n in range(80)]
    assert answers.count({}) == 64
    assert answers[-1] == "TRYAGAIN tier null has 64 clears to do; try again later"
    gate.open()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((str(LEFT), 0), "ERR LMTIER.COMMIT takes marks in pairs"),
        ((str(LEFT), 0, "xy"), "ERR 'xy' is not hexadecimal"),
        ((str(LEFT), 0, "00" * 3073), "ERR a mark has at most 3072 bytes"),
        ((str(WHOLE),), "MISUSE shard L0-2H0-2 is not of this reservation"),
        (("*",), "MISUSE this reservation has 2 shards"),
    ],
)
def test_a_wrong_commit_commits_nothing(engines, words, error):
    connection = Connection(engines, "NAME", "x")
    number = connection.say("RESERVE", connection.form(LAYOUT, LEFT, RIGHT), 0, b"".join(keys(2)))["id"]
    assert connection.say("COMMIT", number, *words).startswith(error)
    for shard in (LEFT, RIGHT):
        assert connection.say("COMMIT", number, str(shard)) == "OK"
    assert connection.say("COMMIT", number, str(LEFT)).startswith("NOSUCH")


ODD = [b"", b"0", b"1", b"2", b"-1", b"*", b"x", b"1e3", b"\xff" * 5, b"9" * 19, b"\0" * 32, *keys(3)]
ODD += [LAYOUT.to_json(), OTHER.to_json(), *(str(each).encode() for each in (WHOLE, LEFT, RIGHT))]
ODD += [
    b"".join(keys(4)),
    keys(1)[0].hex().encode(),
    b"ENGINE",
    b"/api/clear",
    b"/api/pin",
    b'{"prefix": "00"}',
    b"00" * 16,
]
WORD = st.one_of(st.sampled_from(ODD), st.integers(0, 5), st.binary(max_size=40))
VERBS = [
    *("HELLO", "SLAB", "FORM", "MATCH", "PREFETCH", "POLL", "RELEASE", "SEEN", "RESERVE"),
    *("COMMIT", "ABORT", "DISCARD", "CALL", "FLUSH"),
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(VERBS), st.lists(WORD, max_size=5)), max_size=25)
)
def test_nothing_an_engine_says_raises_or_leaks(said):
    """Ids are told to the commands as 1 to 5: the session's latest match or reservation takes their place."""
    config = Config(tiers=(f"cpu://?capacity={6 * ROOM}",), chunk_tokens=C, prefault=False)
    with Cache(config) as cache:
        engines = EngineVerbs(cache)
        connections = [Connection(engines, "ENGINE", secret("e")) for _ in range(2)] + [Connection(engines)]
        table, latest = engines.table(), 0
        for connection in connections[:2]:
            connection.form()
            connection.form(LAYOUT, LEFT, RIGHT)
        for who, verb, words in said:
            arity = table[f"LMTIER.{verb}".encode()].arity
            count = len(words) + 1
            if count != arity and not arity < 0 <= count + arity:
                continue
            is_about_one = verb in ("COMMIT", "ABORT", "POLL", "PREFETCH", "RELEASE") and words
            if is_about_one and isinstance(words[0], int):
                words = [latest, *words[1:]]
            reply = connections[who].say(verb, *words)
            if isinstance(reply, dict) and reply.get("id"):
                latest = reply["id"]
            cache.check()
        for connection in connections:
            connection.close()
        cache.check()
        assert leased(cache) == 0
        cache.clear()
        assert cache.slab.used == 0


def test_a_match_gets_the_place_of_the_state_at_its_end(engines):
    state = Layout((LayerShape(1, 600, 0),), "u8", C, C, "state")
    names = keys(3)
    one = Connection(engines, "ENGINE", secret("one"))
    chunks, states = one.form(), one.form(state)
    one.say("COMMIT", one.say("RESERVE", chunks, 0, *names)["id"], str(WHOLE))
    assert one.say("MATCH", f"{chunks}+{states}", 0, 0, *names)["sources"] == b""
    end = state_key(names[1], state.to_json())
    one.say("COMMIT", one.say("RESERVE", states, 1, names[1], end)["id"], str(state.whole))
    reply = one.say("MATCH", f"{chunks}+{states}", 0, 0, *names)
    assert reply["sources"] == b"cpu*2"
    assert dict(zip(reply["end"][::2], reply["end"][1::2], strict=True))[b"sources"] == b"cpu*1"
    assert one.say("MATCH", f"{chunks}+7", 0, 0, *names).startswith("NOSUCH form 7")
