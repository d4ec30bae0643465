"""A real vLLM passes on which session a request belongs to, and the hints that came with it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from lmtier.rules.hints import envelope
from lmtier.tools.console import Console, ServerAddress
from lmtier_integrations.vllm.request_inputs import said_by
from tests.server.process import served, until
from tests.vllm.conftest import CHUNK, CacheServer, alone, prompts_of, transfer
from tests.vllm.engine import Engine


def listed(remote: Console) -> dict[str, dict[str, Any]]:
    return {each["session"]: each for each in remote.get("/api/sessions", list)}


def pins(remote: Console) -> list[int]:
    return [each["chunks"] for each in remote.get("/api/pins", list)]


def test_sessions_and_hints_reach_the_server_in_both_ways(models, tmp_path, server: CacheServer):
    first, second, third = prompts_of(600, 600, 600)
    remote = Console(ServerAddress(unix=str(server.path)))
    with (
        Engine(
            *(tmp_path, models / "qwen2"), transfer=transfer(server=str(server.path)), max_model_len=2048
        ) as engine,
    ):
        # as kv_transfer_params, in every version
        engine.generate([first], params={"lmtier_session": "one"})
        engine.generate([second], params={"lmtier_session": "two", "lmtier_parent": "one"})
        engine.forget()
        told = {"lmtier_session": "one", "lmtier_hints": envelope("m1", ("pin", {}), ("fetch", {}))}
        assert engine.generate([first], params=told)[0].cached == 512
        until(lambda: pins(remote) == [2])
        found = listed(remote)
        assert (found["one"]["requests"], found["one"]["children"], found["two"]["parent"]) == (2, 1, "one")
        assert (found["one"]["saved"], found["one"]["kept"]["cpu"]) == (512, 512)

        # as vLLM's own fields, from 0.32 on
        engine.ask_in_session(third, "three", salt="tenant")
        until(lambda: "three" in listed(remote))
        engine.ask_in_session(third, "three", envelope("m2", ("session_end", {})), salt="tenant")
        until(lambda: "three" not in listed(remote))
        # another tenant cannot end it
        engine.ask_in_session(first, "other", envelope("m3", ("session_end", {"session": "one"})), "tenant")
        engine.ask_in_session(first, "other", envelope("m4", ("session_end", {})), "tenant")
        until(lambda: "other" not in listed(remote))
        assert listed(remote).keys() >= {"one", "two"}
        # and what its own ends
        engine.ask_in_session(second, "two", envelope("m5", ("session_end", {})))
        engine.ask_in_session(first, "one", envelope("m6", ("session_end", {})))
        until(lambda: not {"one", "two"} & listed(remote).keys())
        assert pins(remote) == []


def test_hints_of_an_uncached_request_reach_the_server(models, tmp_path, server: CacheServer):
    """Its prompt is given as embeddings, which have no names. The session that it ends has other prompts."""
    (prompt,) = prompts_of(600)
    ends = {"lmtier_session": "one", "lmtier_hints": envelope("m1", ("session_end", {}))}
    how = transfer(server=str(server.path))
    options: dict[str, Any] = {"max_model_len": 2048, "enable_prompt_embeds": True}
    remote = Console(ServerAddress(unix=str(server.path)))
    with (
        Engine(tmp_path, models / "qwen2", transfer=how, **options) as engine,
    ):
        alone(engine, prompts_of(40))
        engine.generate([prompt], params={"lmtier_session": "one"})
        until(lambda: "one" in listed(remote))
        engine.embed([(1, 300)], params=ends)
        until(lambda: "one" not in listed(remote))


def test_a_request_that_names_a_host_is_not_prefilled_again(models, tmp_path):
    (prompt,) = prompts_of(1100)
    cpu, config = "cpu://?capacity=64MiB", {"chunk_tokens": CHUNK, "worth": "always", "verify": "always"}
    for each in ("a", "b"):
        (tmp_path / each).mkdir()
    with served(tmp_path / "a", cpu, config=config, unix=str(tmp_path / "a.sock")) as other:
        place = "{}:{}".format(*other.address)
        with served(tmp_path / "b", cpu, f"lmtier://{place}", config=config, unix=str(tmp_path / "b.sock")):
            with Engine(
                tmp_path, models / "qwen2", transfer=transfer(server=str(tmp_path / "a.sock"))
            ) as one:
                right = one.generate([prompt])[0]
            with Engine(
                tmp_path, models / "qwen2", transfer=transfer(server=str(tmp_path / "b.sock"))
            ) as two:
                got = two.generate([prompt], params={"lmtier_source": place})[0]
    whole = len(prompt) // CHUNK * CHUNK
    assert (right.cached, got.cached, got.tokens) == (0, whole, right.tokens)


WRONG = {"lmtier_session": 7, "lmtier_parent": "x" * 1000, "lmtier_source": ["a:1"], "lmtier_hints": "x"}
ODD = {"lmtier_hints": {"actions": [object()]}}


@pytest.mark.parametrize("said", ["x", ["lmtier_session"], 7, {}, WRONG, ODD])
def test_wrong_words_about_sessions_stop_no_engine(said):
    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = said  # versions differ in what they let through
    found = said_by(request)
    assert (found.session, found.parent, found.source, found.hints) == ("", "", "", ())


def test_hints_without_a_session_are_about_their_prompt():
    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {"lmtier_hints": envelope("m", ("pin", {}))}
    assert said_by(request).session == "r"
