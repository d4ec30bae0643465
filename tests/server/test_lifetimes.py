"""Lifetimes on a real server: what outlives a session and a restart, what does not; the commands for it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lmtier.client.client import Client
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.core.match import Lookup
from lmtier.core.placement import read_runs
from lmtier.errors import MisuseError
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.format.layout import ChunkForm, form_of, padded
from lmtier.server import prefetching
from lmtier.testing import MemoryTier, opaque_layout
from lmtier.tiers.base import Item
from lmtier.tools.cli import main
from tests.server.process import PATIENCE, Served, until
from tests.server.test_engines import leased

LAYOUT = opaque_layout(8192)  # one token a chunk
FORM = form_of(LAYOUT, [LAYOUT.whole])
ROOM = padded(8192)
IDENTITY = Identity(model="m", weights="w", layers=32)
TOKENS = list(range(100, 112))


def keys(tokens: list[int], salt: str = "", identity: Identity = IDENTITY) -> list[bytes]:
    return KeyChain(seed(identity, 1, salt=salt), 1, tokens).keys


def store(client: Client, names: list[bytes], ttl: float | None = None) -> None:
    client.commit(client.reserve(names, FORM, ttl=ttl))


def look(client: Client, names: list[bytes]) -> list[str]:
    match = client.wait(client.match(names, FORM))
    sources = list(match.sources)
    client.release(match)
    return sources


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    disk = f"disk://{tmp_path}/kv?capacity=1MiB"
    tiers = (f"cpu://?capacity={16 * ROOM}", disk)
    served = Served(tmp_path, *tiers, config={"chunk_tokens": 1}, unix=str(tmp_path / "socket"))
    yield served
    served.process.kill()
    served.process.wait()


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.where["unix"]) as client:
        yield client


@pytest.fixture
def run(capsys, monkeypatch, server, tmp_path):
    """A command line about a file of tokens; its exit code, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("LMTIER_")]:
        monkeypatch.delenv(name)
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))

    def run(*argv):
        code = main([str(each) for each in argv])
        return code, *capsys.readouterr()

    return run


def restart(server: Served) -> None:
    server.process.terminate()
    server.process.wait(PATIENCE)
    server.start()


def test_chunks_that_expire_between_runs_are_not_served(server, client):
    began = time.monotonic()
    store(client, keys(TOKENS, "kept"), ttl=3600)
    assert client.flush()
    ttl = 3 + 4 * (time.monotonic() - began)  # the disk takes the others before that, however slow it is
    store(client, keys(TOKENS), ttl=ttl)
    stored = time.monotonic()
    assert client.flush()
    client.close()
    server.kill()
    server.start()
    until(lambda: time.monotonic() > stored + ttl + 0.1, ttl + PATIENCE)
    with Client(server.where["unix"]) as again:
        assert look(again, keys(TOKENS, "kept")) == ["disk"] * 12
        assert look(again, keys(TOKENS)) == []
        assert server.report()["counted"]["missed"] == {"expired": 12}
        again.check()


def test_a_pin_outlives_its_session_and_not_its_server(server, client):
    store(client, keys(TOKENS[:6]))
    assert client.pin("system", keys(TOKENS[:6]))["cpu"] == 6  # and on disk what was written by then
    client.flush()
    assert client.pinned()[0].pinned == {"cpu": 6, "disk": 6}
    client.close()
    with Client(server.where["unix"]) as other:
        for i in range(4):
            store(other, keys(list(range(8)), f"flood{i}"))
            assert other.flush()
        assert look(other, keys(TOKENS[:6])) == ["cpu"] * 6
        with pytest.raises(MisuseError, match="cpu gives pins half"):
            other.pin("more", keys(list(range(8)), "flood3"))
        assert other.unpin("system")
        assert not other.unpin("system")
        other.check()
        other.pin("system", keys(TOKENS[:6]))
    restart(server)
    with Client(server.where["unix"]) as other:
        assert other.pinned() == []


def test_a_prompt_is_brought_up_and_pinned_by_its_tokens(server, client, run, tmp_path):
    client.declare(IDENTITY, FORM)
    store(client, keys(TOKENS))
    assert client.flush()
    client.close()
    restart(server)
    with Client(server.where["unix"]) as engine:
        engine.declare(IDENTITY, FORM)
        engine.check()
        where = server.where["redis"]
        code, out, _ = run("prefetch", tmp_path / "tokens.json", "--server", where, "--json")
        assert (code, json.loads(out)["prompts"]) == (
            0,
            [{"tokens": 12, "chunks": 12, "there": 0, "brought_up": {"disk": 12}, "missing": 0, "why": ""}],
        )
        assert look(engine, keys(TOKENS)) == ["cpu"] * 12
        (tmp_path / "tokens.json").write_text(f"{TOKENS[:5]}\n{[*TOKENS[:3], 1, 2]}\n")
        code, out, _ = run("prefetch", tmp_path / "tokens.json", "--server", where, "--pin", "p")
        assert code == 1
        assert [line.split() for line in out.splitlines()][-3:] == [
            ["1", "5", "5", "5", "0", "0"],
            ["2", "5", "5", "3", "0", "2"],
            ["pinned", "as", "p:", "5", "in", "cpu,", "5", "in", "disk"],
        ]
        report = server.report()
        assert (report["counted"]["lookups"], report["counted"]["asked"]) == (1, 12)
        assert [tier["pinned"] for tier in report["tiers"]] == [5 * ROOM, 5 * (ROOM + 4096)]


def test_pin_pins_and_unpin(server, client, run, tmp_path):
    where = server.where["redis"]
    file = tmp_path / "tokens.json"
    code, _, err = run("pin", file, "--name", "p", "--server", where)
    assert (code, "no engine has sent" in err) == (2, True)
    client.declare(IDENTITY, FORM)
    store(client, keys(TOKENS[:4], "tenant"))
    client.flush()
    code, out, _ = run("pin", file, "--name", "p", "--server", where, "--salt", "tenant", "--ttl", "1h")
    assert code == 0
    assert out == "pinned as p, 12 chunks: 4 in cpu, 4 in disk; others as soon as they come\n"
    code, out, _ = run("pins", "--server", where)
    assert code == 0
    assert re.fullmatch(r"p +12 +4 in cpu, 4 in disk +59 min \d+ s", out.splitlines()[-1].strip())
    code, out, _ = run("stats", "--server", where)
    assert "pinned" in out
    assert run("unpin", "p", "--server", where)[:2] == (0, "unpinned p\n")
    assert run("unpin", "p", "--server", where)[:2] == (1, "nothing is pinned as p\n")
    assert run("pins", "--server", where)[:2] == (0, "nothing is pinned\n")
    client.check()


def test_which_model_is_meant_must_be_clear(server, client, run, tmp_path):
    where, file = server.where["redis"], tmp_path / "tokens.json"
    client.declare(IDENTITY, FORM)
    with Client(server.where["unix"]) as other:
        other.declare(Identity(model="n"), FORM)
        other.check()
    client.check()
    code, _, err = run("prefetch", file, "--server", where)
    assert (code, "which model? name it with --model: m, n" in err) == (2, True)
    code, _, err = run("prefetch", file, "--server", where, "--model", "o")
    assert (code, "known: m, n" in err) == (2, True)
    code, _, err = run("prefetch", file, "--server", where, "--model", "n")
    assert (code, "does not know its weights" in err) == (2, True)
    assert run("prefetch", file, "--server", where, "--model", "m")[0] == 1
    code, _, err = run("prefetch", file, "--server", where, "--model", "m", "--lora", "poet")
    assert (code, "no engine has used adapter 'poet' yet" in err) == (2, True)
    client.declare(IDENTITY, FORM, "poet\0content")
    store(client, KeyChain(seed(IDENTITY, 1, lora="poet\0content"), 1, TOKENS).keys)
    assert run("prefetch", file, "--server", where, "--model", "m", "--lora", "poet")[0] == 0


def test_a_prompt_of_more_keys_than_one_argument_is_pinned(server, client, run, tmp_path):
    client.declare(IDENTITY, FORM)
    client.check()
    where, file = server.where["redis"], tmp_path / "tokens.json"
    file.write_text(json.dumps(list(range(40_000))))
    code, out, _ = run("pin", file, "--name", "p", "--server", where)
    assert (code, "pinned as p, 40000 chunks" in out) == (0, True)
    file.write_text(json.dumps(list(range(70_000))))
    for command in (("pin", file, "--name", "p"), ("prefetch", file)):
        code, _, err = run(*command, "--server", where)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "of 70,000 chunks is more than a server takes: at most 65,536" in err


@pytest.mark.parametrize(
    ("time", "why"), [("0", "must be more than 0"), ("0s", "must be more than 0"), ("101000d", "100 years")]
)
def test_a_pin_that_ends_at_once_or_never_is_refused(run, tmp_path, time, why):
    for command in (("pin", "--name", "p"), ("prefetch", "--pin", "p")):
        code, _, err = run(*command, tmp_path / "tokens.json", "--ttl", time)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "--ttl: " in err
        assert why in err


class Slow(MemoryTier):
    """Two reads at a time, which take so long each; the first few come too late."""

    def __init__(self, seconds: float, late: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.late = count(-late)

    def read(self, item: Item, buffers: Sequence[memoryview]) -> int:
        if next(self.late) < 0:
            raise TimeoutError
        time.sleep(self.seconds)
        return super().read(item, buffers)


@pytest.mark.parametrize(
    ("seconds", "late"),
    [(0.005, 0), (0.0, 4), (0.0, 6)],
    ids=["a slow tier", "a tier that was late", "a tier that is not asked any more"],
)
def test_a_prefetch_from_a_slow_tier_completes(monkeypatch, seconds, late):
    names = keys(list(range(300)))
    url, tier = "memory://?capacity=100MiB", Slow(seconds, late)
    monkeypatch.setattr(prefetching, "_PORTION", 8 * ROOM)
    tiers = (f"cpu://?capacity={310 * ROOM}", url)
    settings = Config(tiers=tiers, chunk_tokens=1, prefault=False, load_deadline=0.4)
    with Cache(settings, tiers={url: MemoryTier(tier.objects)}) as cache:
        cache.commit(cache.reserve(names, FORM))
        assert cache.flush()
    with Cache(settings, tiers={url: tier}, shared=True) as cache:
        asked: list[int] = []
        bring = cache.bring

        def counted(keys: Sequence[bytes], form: ChunkForm, **options: Any) -> Lookup:
            asked.append(len(keys))
            return bring(keys, form, **options)

        monkeypatch.setattr(cache, "bring", counted)
        going, found = prefetching.prefetching(cache, names, FORM), None
        while found is None:
            try:
                next(going)
            except StopIteration as end:
                found = end.value
            cache._wait(time.monotonic() + 0.05)
            cache.step()
        assert len(read_runs(found["sources"].encode())) == 300
        assert (found["is_over"], found["why"]) == (True, "")
        assert asked[0] == 8
        assert leased(cache) == 0
        assert not cache.lower[0].load_breaker.is_open


@pytest.mark.parametrize("text", ["", "{}", "[1.5]", '["a"]', "[[1], 2]", "[1]\nx", "[true]"])
def test_a_file_that_holds_no_tokens_is_refused_in_one_line(run, tmp_path, text):
    (tmp_path / "tokens.json").write_text(text)
    code, _, err = run("prefetch", tmp_path / "tokens.json")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "tokens.json" in err


def test_an_engine_that_comes_back_tells_its_model_again(server, client):
    client.declare(IDENTITY, FORM)
    client.check()
    restart(server)
    until(lambda: look(client, keys(TOKENS)) == [] and client.stats() != {})
    (model,) = server.call("/api/models")
    assert model["identity"]["model"] == "m"
