"""Why a lookup missed: what is known is said, what is not is said to be so, and tokens only on demand."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import LayoutError
from lmtier.format.keys import Identity, KeyChain, as_tokens, seed
from lmtier.format.layout import form_of, padded
from lmtier.observe.journal import LENGTH
from lmtier.observe.prompts import Origin, Prompts
from lmtier.server.explain import MAX_KEYS, MAX_LOOKUPS, Explain, Explanation
from lmtier.testing import FlakyTier, FullTier, MemoryTier, opaque_layout
from lmtier.tiers.base import Op
from tests.client.test_client import ONE, serve  # noqa: F401  # the fixture
from tests.server.process import until

C = 4
LAYOUT = replace(opaque_layout(8192), chunk_tokens=C, block_tokens=C)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
ROOM = padded(8192)
MODEL = Identity(model="m", weights="w")
PROMPT = list(range(100, 100 + 4 * C))


class Engine:
    """Looks prompts up, stores what was missing, and tells its tokens if it is open."""

    def __init__(self, cache: Cache, explain: Explain, *, is_open: bool = True) -> None:
        self.cache, self.explain, self.is_open = cache, explain, is_open

    def keys(
        self, tokens: list[int], identity: Identity = MODEL, lora: str = "", salt: str = ""
    ) -> list[bytes]:
        keys = KeyChain(seed(identity, C, lora=lora, salt=salt), C, tokens).keys
        if self.is_open:
            origin = Origin.of({"model": identity.model, "weights": identity.weights}, lora, salt)
            self.explain.prompts.add(keys, as_tokens(tokens).tobytes(), origin)
        return keys

    def look(self, tokens: list[int], **origin: Any) -> list[bytes]:
        keys = self.keys(tokens, **origin)
        match = self.cache.wait(self.cache.match(keys, FORM))
        match.asker = "engine"
        self.cache.release(match)
        return keys

    def store(self, tokens: list[int], **origin: Any) -> list[bytes]:
        keys = self.keys(tokens, **origin)
        reservation = self.cache.reserve(keys, FORM)
        if reservation.chunks:
            self.cache.commit(reservation)
        self.cache.flush()
        return keys

    def why(self, *, tokens: bool = False) -> Explanation:
        return self.explain.recent(tokens=tokens)[0]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def start() -> Iterator[Any]:
    caches: list[Cache] = []

    def start(*urls: str, chunks: int = 8, opened: Any = None, is_open: bool = True) -> tuple[Engine, Clock]:
        tiers = (f"cpu://?capacity={chunks * ROOM}&policy=lru", *urls)
        cache = Cache(Config(tiers=tiers, chunk_tokens=C, prefault=False), tiers=opened)
        caches.append(cache)
        clock = Clock()
        return Engine(cache, Explain(cache, clock), is_open=is_open), clock

    yield start
    for cache in caches:
        cache.close(timeout=5)
        cache.check()


def test_a_whole_hit_has_nothing_to_explain(start):
    engine, _ = start()
    engine.store(PROMPT)
    engine.look(PROMPT)
    assert engine.explain.recent() == []


def test_an_evicted_chunk_says_from_where_and_when(start, tmp_path: Path):
    engine, clock = start(f"disk://{tmp_path}?capacity={5 * 3 * 4096}", chunks=4, is_open=False)
    engine.store(PROMPT)
    clock.now += 5
    engine.store([7] * 4 * C)  # out of memory
    clock.now += 30
    engine.store([8] * 4 * C)
    engine.store([9] * 4 * C)  # out of the disk, which has room for five or so
    clock.now += 10
    engine.look(PROMPT)
    said = engine.why()
    assert said["reason"] == "evicted"
    assert said["why"].startswith("was evicted from cpu 40 s earlier, was evicted from disk 10 s earlier")
    assert said["asker"] == "engine"
    clock.now += 3
    assert engine.why()["ago"] == 3


def test_an_eviction_before_the_journal_has_no_time(start):
    engine, _ = start(chunks=4, is_open=False)
    engine.store(PROMPT)
    engine.store([7] * 4 * C)
    keys = [sha256(b"%d" % number).digest() for number in range(LENGTH)]
    engine.explain.journal.changed("cpu", True, keys, "")
    engine.look(PROMPT)
    assert "when is not known" in engine.why()["why"]


def test_a_chunk_stored_again_is_explained_as_it_was_then(start):
    engine, clock = start(chunks=4)
    engine.store(PROMPT)
    engine.store([7] * 4 * C)
    clock.now += 20
    engine.look(PROMPT)
    clock.now += 1
    engine.store(PROMPT)
    assert engine.why()["why"] == "was evicted from cpu 20 s earlier"


def test_the_first_different_token_is_found(start):
    """The tokens themselves show only on demand."""
    engine, _ = start()
    engine.store(PROMPT)
    other = [*PROMPT[:6], 1, 2, *PROMPT[8:]]
    engine.look(other)
    said = engine.why()
    assert (said["chunk"], said["hit"], said["token"], said["is_exact"]) == (1, {"cpu": C}, 6, True)
    assert said["why"] == "never stored; the nearest stored prompt differs from token 6 on"
    assert (said["here"], said["there"]) == ([], [])
    shown = engine.why(tokens=True)
    assert (shown["here"], shown["there"]) == ([1, 2], PROMPT[6:8])


def test_of_several_stored_prompts_the_nearest_is_named(start):
    engine, _ = start()
    for tokens in ([1, 0, 0, 0], [1, 2, 3, 0], [1, 2, 0, 0]):
        engine.store(tokens)
    engine.look([1, 2, 3, 4])
    assert engine.why()["token"] == 3


def test_the_first_chunk_is_compared_within_its_own_model(start):
    """Prompts of another model, salt or adapter are not compared."""
    engine, _ = start()
    engine.store([1, 2, 3, 4], salt="theirs")
    engine.look([1, 2, 3, 5])
    assert engine.why()["is_exact"] is False


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"salt": "tenant-a"}, "never stored; the same tokens are: salt differs"),
        ({"lora": "sql"}, "never stored; the same tokens are: adapter differs (none here, sql there)"),
        (
            {"identity": Identity(model="m", weights="other")},
            "never stored; the same tokens are: model identity differs (weights)",
        ),
        ({"lora": "sql", "salt": "s"}, "adapter differs (none here, sql there), salt differs"),
    ],
)
def test_the_same_tokens_under_another_name_are_recognised(start, stored, said):
    engine, _ = start()
    engine.store(PROMPT, **stored)
    engine.look(PROMPT)
    assert engine.why()["why"].endswith(said)
    assert "tenant-a" not in str(engine.explain.recent(tokens=True))


def test_later_stores_and_cleared_ones_explain_nothing(start):
    engine, clock = start()
    for tokens, origin in ((PROMPT, {"salt": "later"}), ([*PROMPT[:3], 0], {})):
        engine.look(PROMPT)
        clock.now += 1
        engine.store(tokens, **origin)
        assert engine.why()["why"] == "never stored; nothing of it is stored"
        engine.cache.clear()
        clock.now += 1
    engine.look(PROMPT)
    assert engine.why()["why"] == "never stored; nothing of it is stored"


def test_without_tokens_what_cannot_be_known_is_said(start):
    engine, _ = start(is_open=False)
    engine.store(PROMPT, salt="theirs")
    engine.look(PROMPT)
    assert "not known: its engine does not send tokens" in engine.why()["why"]
    engine.store(PROMPT)
    engine.look(PROMPT)
    engine.look([*PROMPT[:6], 1, 2, *PROMPT[8:]])
    said = engine.why()
    assert (said["chunk"], said["token"], said["is_exact"]) == (1, C, False)
    assert "goes on differently from somewhere within tokens 4 to 7" in said["why"]
    engine.look([*PROMPT, *PROMPT])
    assert engine.why()["why"] == "never stored; what is stored of it ends before token 16"


def test_a_chunk_that_differed_from_what_was_saved_says_so(start):
    engine, clock = start()
    first = engine.store(PROMPT)[0]
    engine.cache.discard(first)
    clock.now += 2
    engine.look(PROMPT)
    assert engine.why()["why"].startswith(
        "was deleted from cpu 2.0 s earlier: it differed from the saved bytes"
    )


def test_what_somebody_cleared_says_so(start):
    engine, _ = start()
    engine.store(PROMPT)
    engine.cache.clear()
    engine.look(PROMPT)
    assert "was deleted from cpu 0.0 s earlier: the cache was cleared" in engine.why()["why"]


def test_failed_stores_and_tiers_not_offered_are_named(start):
    tier = FullTier(MemoryTier())
    urls = ("memory://?capacity=1MiB", "other://?capacity=1MiB&write=reused")
    engine, clock = start(*urls, chunks=4, opened={urls[0]: tier, urls[1]: MemoryTier()}, is_open=False)
    engine.store(PROMPT)
    engine.store([7] * 4 * C)
    clock.now += 7
    engine.look(PROMPT)
    why = engine.why()["why"]
    assert "was evicted from cpu 7.0 s earlier" in why
    assert "was not stored in memory 7.0 s earlier: the tier had no room" in why
    assert "not admitted to other: write=reused" in why


def test_a_store_that_found_no_room_is_named(start):
    engine, _ = start(chunks=4)
    keys = engine.store(PROMPT)
    held = engine.cache.match(keys, FORM)
    engine.store([7] * 4 * C)
    engine.look([7] * 4 * C)
    assert (
        "was not stored in cpu 0.0 s earlier: everything that could leave was leased" in engine.why()["why"]
    )
    engine.cache.release(held)


def test_a_chunk_lost_on_its_way_up_is_explained(start):
    tier = FlakyTier(MemoryTier(), every=1, ops=(Op.LOAD,))
    url = "memory://?capacity=1MiB"
    engine, _ = start(url, opened={url: tier})
    engine.store(PROMPT)
    for number in range(2):
        engine.store([number] * 4 * C)
    engine.look(PROMPT)
    assert engine.why()["why"] == "error: its tier failed to read it"


def test_the_same_miss_again_and_again_is_one_line(start):
    engine, _ = start()
    for _ in range(3):
        engine.look(PROMPT)
    engine.look([7] * C)
    assert [(each["times"], each["asked"]) for each in engine.explain.recent()] == [(1, C), (3, 4 * C)]
    assert len(engine.explain.recent(1)) == 1


def test_memory_is_bounded(start):
    engine, _ = start(is_open=False)
    explain = engine.explain
    for number in range(MAX_LOOKUPS + 10):
        engine.look([number] * C)
    assert len(explain._lookups) == MAX_LOOKUPS
    long = list(range(MAX_KEYS // 2 * C))
    engine.look(long)
    engine.look([5, *long[1:]])
    engine.look([6, *long[1:]])
    assert sum(len(each[1].keys) for each in explain._lookups) == explain._keys <= MAX_KEYS


def test_told_prompts_are_bounded_and_forget_tails_first():
    prompts = Prompts(C, max_bytes=10 * 1300)
    origin = Origin.of({}, "", "")
    for number in range(50):
        tokens = as_tokens([1] * C + [number] * 8 * C)
        keys = KeyChain(seed(MODEL, C), C, tokens).keys
        prompts.add(keys, tokens.tobytes(), origin)
        assert prompts._bytes <= 10 * 1300
        assert prompts.get(keys[0]) is not None
    assert len(prompts) <= 11
    assert sum(map(len, prompts._next.values())) == sum(map(len, prompts._same.values())) == len(prompts)


@pytest.mark.parametrize("fields", [0, 14, 1500])
def test_told_prompts_take_no_more_memory_than_is_said(fields):
    """Whatever is told: an origin of many short fields takes thirty times its JSON."""
    origin = {"identity": {f"{i}": "" for i in range(fields)}, "lora": "", "salt": ""}
    most = 1 << 20
    tracemalloc.start()
    try:
        prompts = Prompts(C, max_bytes=most)
        for number in range(4 * most // 1200 if fields < 1500 else 200):
            text = json.dumps({**origin, "salt": str(number if fields else 0)}, separators=(",", ":"))
            words = number.to_bytes(4 * C, "big")
            prompts.add([number.to_bytes(32, "big")], words, Origin.from_json(text.encode()))
        assert tracemalloc.get_traced_memory()[0] <= 1.1 * most
        assert prompts._users.keys() == set(map(id, prompts._origins)), "an origin nobody has is kept"
    finally:
        tracemalloc.stop()


def test_what_is_told_bit_by_bit_is_as_what_is_told_at_once():
    origin = Origin.of({"model": "m"}, "", "s")
    keys, words = KeyChain(seed(MODEL, C), C, PROMPT).keys, as_tokens(PROMPT).tobytes()
    once, bits = Prompts(C), Prompts(C)
    once.add(keys, words, origin)
    for number, key in enumerate(keys):
        part = words[number * 4 * C : (number + 1) * 4 * C]
        bits.add([key], part, origin, keys[number - 1] if number else None)
    assert [once.get(key) for key in keys] == [bits.get(key) for key in keys]
    bits.add([b"x" * 32], words[: 4 * C], origin, b"unknown parent".ljust(32))
    assert len(bits) == len(keys)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": 1, "lora": "", "salt": ""}', "[" * 100_000])
def test_an_origin_that_is_none_is_refused(text):
    with pytest.raises(LayoutError):
        Origin.from_json(text.encode())


def test_an_engine_tells_and_asks_over_its_socket(serve):  # noqa: F811
    from lmtier.client.client import Client
    from lmtier.tools.console import Console, ServerAddress

    server = serve()
    remote = Console(ServerAddress(unix=server.path))
    with (
        Client(server.path, name="engine-7") as client,
    ):
        size = client.chunk_tokens
        tokens = list(range(3 * size))
        other = [*tokens[: size + 1], 9, *tokens[size + 2 :]]
        origin = Origin.of({"model": "m"}, "", "secret")
        for each in (tokens, other):
            keys = KeyChain(seed(MODEL, size, salt="secret"), size, each).keys
            match = client.match(keys, ONE, tokens=len(each))
            client.send_tokens(keys, each, origin)
            reservation = client.reserve(keys, ONE)
            if each is tokens:
                client.commit(reservation)
            else:
                client.abort(reservation)
            client.release(match)
        until(lambda: len(remote.explanations(5)) == 2)
        said, first = remote.explanations(5, tokens=True)
        assert (said["asker"], said["token"], said["is_exact"]) == ("engine-7", size + 1, True)
        assert said["there"][0] == tokens[size + 1]
        assert said["here"][0] == 9
        assert first["why"].startswith("never stored")
        assert "secret" not in str((said, first))
        assert remote.explanations(5)[0]["here"] == []
