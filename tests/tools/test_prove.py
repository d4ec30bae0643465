"""`lmtier prove` against small engines that are right or wrong on purpose, over HTTP.

tests/vllm/test_prove.py does the same with a real engine.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.tools.cli import main
from lmtier.tools.prove import report
from lmtier.tools.prove.compare import Noise, Position, distance
from lmtier.tools.prove.endpoint import Endpoint, NoAnswer, Query
from lmtier.tools.prove.prompts import PromptWriter, image, length
from lmtier.tools.prove.proof import Effort, Proof

CHUNK = 64


class ToyEngine:
    """Answers by a hash of the prompt. Below it lies a cache: what each chunk adds to the hash."""

    cuts_chunks = False
    """Whether its answers are in chunks, and break off inside one."""

    def __init__(
        self, *, salts: bool = True, logprobs: bool = True, text: bool = True, rounding: float = 1e-4
    ) -> None:
        self.salts, self.logprobs, self.text, self.rounding = salts, logprobs, text, rounding
        self.bodies: list[dict[str, Any]] = []
        """What it was asked."""
        self.own: set[tuple[Any, ...]] = set()
        """Prefixes in the engine's own cache."""
        self.below: dict[tuple[Any, ...], int] = {}
        self.lock = threading.Lock()
        self.rounds = 0
        """Each answer rounds in another way."""
        self.key = ""
        """The API key that it asks for."""

    def name(self, salt: str, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        """Of the prefix that ends here."""
        return salt, tokens

    def stored(self, value: int) -> int:
        return value

    def state(self, salt: str, tokens: tuple[int, ...]) -> tuple[int, int]:
        """What all tokens come to, and how many of them were not computed."""
        total = cached = end = 0
        with self.lock:
            reuses = True
            for end in range(CHUNK, len(tokens), CHUNK):
                name, value = self.name(salt, tokens[:end]), hash(tokens[:end])
                if reuses and (name in self.own or name in self.below):
                    value = value if name in self.own else self.below[name]
                    cached = end
                else:
                    reuses = False
                    self.below.setdefault(name, self.stored(value))
                self.own.add(name)
                total ^= value
        return total ^ hash(tokens[end:]), cached

    def answer(self, salt: str, tokens: tuple[int, ...], count: int, seed: Any) -> tuple[list[Any], int]:
        state, cached = self.state(salt, tokens)
        positions = []
        self.rounds += 1
        for number in range(count):
            digest = hashlib.sha256(f"{state} {number} {seed}".encode()).digest()
            order = sorted(range(5), key=lambda each: digest[each])
            likely = {
                f"token_id:{each}": -0.5 * rank + math.sin(self.rounds) * self.rounding
                for rank, each in enumerate(order)
            }
            positions.append((f"token_id:{order[0]}", likely))
        return positions, cached


class StaleBelow(ToyEngine):
    def stored(self, value: int) -> int:
        return value + 1


class NoSaltBelow(ToyEngine):
    def name(self, salt: str, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        return (tokens,)


class NamedByLength(ToyEngine):
    def name(self, salt: str, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        return salt, len(tokens)


class NamedWithoutParents(ToyEngine):
    def name(self, salt: str, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        return salt, len(tokens), tokens[-CHUNK:]


class Reuses(ToyEngine):
    """Nothing below."""

    def state(self, salt: str, tokens: tuple[int, ...]) -> tuple[int, int]:
        self.below.clear()
        return super().state(salt, tokens)


class ReusesNothing(ToyEngine):
    def state(self, salt: str, tokens: tuple[int, ...]) -> tuple[int, int]:
        self.below.clear()
        self.own.clear()
        return super().state(salt, tokens)


class FailsOften(ToyEngine):
    asked = 0

    def answer(self, salt: str, tokens: tuple[int, ...], count: int, seed: Any) -> tuple[list[Any], int]:
        self.asked += 1
        if self.asked % 40 == 39:
            raise ConnectionAbortedError
        return super().answer(salt, tokens, count, seed)


class FailsWhenLong(ToyEngine):
    def answer(self, salt: str, tokens: tuple[int, ...], count: int, seed: Any) -> tuple[list[Any], int]:
        if len(tokens) > 60:
            raise ConnectionAbortedError
        return super().answer(salt, tokens, count, seed)


class FailsOnDemand(ToyEngine):
    fails = False

    def answer(self, salt: str, tokens: tuple[int, ...], count: int, seed: Any) -> tuple[list[Any], int]:
        if self.fails:
            raise ConnectionAbortedError
        return super().answer(salt, tokens, count, seed)


class CutsChunks(ToyEngine):
    cuts_chunks = True


class Wavers(ToyEngine):
    """It answers one prompt in two ways, now and then."""

    asked = 0

    def answer(self, salt: str, tokens: tuple[int, ...], count: int, seed: Any) -> tuple[list[Any], int]:
        self.asked += 1
        return super().answer(salt, tokens, count, (seed, self.asked % 7 == 3))


@contextmanager
def running(engine: ToyEngine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, found: Any, status: int = 200) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            may = not engine.key or self.headers["Authorization"] == f"Bearer {engine.key}"
            if not may:
                self.reply({}, 401)
            return may

        def do_GET(self) -> None:
            match self.path:
                case "/v1/models":
                    self.reply({"data": [{"id": "toy", "max_model_len": 4096}]})
                case "/openapi.json":
                    self.reply({"cache_salt": 1} if engine.salts else {})
                case _:
                    self.reply({}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset_prefix_cache":
                with engine.lock:
                    engine.own.clear()
                return self.reply({})
            engine.bodies.append(body)
            if engine.cuts_chunks:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"40\r\ndata: {")
                return None
            prompt = body.get("prompt")
            if prompt is None or (isinstance(prompt, str) and not engine.text):
                return self.reply({"error": "no"}, 400)
            tokens = tuple(map(hash, prompt.split())) if isinstance(prompt, str) else tuple(prompt)
            seed, salt = body.get("seed"), body.get("cache_salt", "") if engine.salts else ""
            parts: list[Any] = []
            for index in range(body.get("n", 1)):
                found, cached = engine.answer(salt, tokens, body["max_tokens"], (seed, index))
                for token, likely in found:
                    logprobs = {"tokens": [token], "top_logprobs": [likely]} if engine.logprobs else None
                    parts.append({"choices": [{"index": index, "text": token, "logprobs": logprobs}]})
            usage: dict[str, Any] = {"prompt_tokens": len(tokens)}
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            parts.append({"choices": [], "usage": usage})
            self.send_response(200)
            self.end_headers()
            for part in parts:
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # who asked has hung up
                self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """These engines have stored everything when they answer."""
    monkeypatch.setattr("lmtier.tools.prove.proof._SETTLE", 0)


def prove(engine: ToyEngine, capsys: Any, *more: str) -> tuple[int, str]:
    with running(engine) as url:
        status = main(["prove", url, "--short", "--seed", "1", *more])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "how", [{}, {"text": False}, {"logprobs": False}], ids=["text", "ids", "no logprobs"]
)
def test_an_engine_that_is_right_is_not_accused(how, capsys):
    status, said = prove(ToyEngine(**how), capsys)
    assert status == 0, said
    assert "RIGHT: " in said
    assert "Not tested: images" in said


def test_the_key_of_an_engine_is_its_files_first_line(tmp_path, capsys):
    (tmp_path / "key").write_bytes(b"the-key\r\nwhat it is for\r\n")
    engine = ToyEngine()
    engine.key = "the-key"
    status, said = prove(engine, capsys, "--key-file", str(tmp_path / "key"))
    assert status == 0, said


@pytest.mark.parametrize("wrong", [StaleBelow, NoSaltBelow, NamedByLength, NamedWithoutParents])
@pytest.mark.parametrize("text", [True, False], ids=["text", "ids"])
def test_a_wrong_cache_is_found(wrong, text, capsys):
    status, said = prove(wrong(text=text), capsys)
    assert status == 1, said
    assert "WRONG: " in said


def test_a_repeated_seed_accuses_no_engine_with_old_prompts(capsys):
    engine = ToyEngine()
    for _ in range(2):
        status, said = prove(engine, capsys)
        assert status == 0, said


@pytest.mark.parametrize(
    "engine", [ToyEngine(salts=False), Reuses(salts=False, rounding=0.01)], ids=["exact", "rounds"]
)
def test_without_salts_a_right_engine_is_not_accused(engine, capsys):
    """What rounds is measured where nothing is reused."""
    status, said = prove(engine, capsys)
    assert status == 0, said
    assert "The engine has no salts" in said


def test_without_salts_a_stale_cache_is_found(capsys):
    """It moves an answer as far as another word does."""
    status, said = prove(StaleBelow(salts=False), capsys)
    assert status == 1, said


def test_without_salts_possible_rounding_proves_nothing(capsys):
    """Everything is reused from below, so what the engine does alone is not known."""
    status, said = prove(ToyEngine(salts=False, rounding=0.01), capsys)
    assert status == 3, said
    assert "the answer is another one" in said
    assert "answers differ, perhaps by the engine's own rounding" in said


def test_an_engine_that_reuses_nothing_proves_nothing(capsys):
    status, said = prove(ReusesNothing(), capsys)
    assert status == 3
    assert "none of them reused any KV" in said


def test_an_engine_that_wavers_too_much_proves_nothing(capsys):
    status, said = prove(Wavers(logprobs=False), capsys)
    assert status == 3, said
    assert "answers one prompt in two ways" in said
    status, said = prove(Wavers(logprobs=False), capsys, "--json")

    def no_json(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    assert json.loads(said, parse_constant=no_json)["noise"]["limit"] is None


def test_an_engine_that_fails_long_prompts_has_a_report(tmp_path, capsys):
    page = tmp_path / "report.html"
    status, said = prove(FailsWhenLong(), capsys, "--html", str(page))
    assert status == 1
    assert "after a restart" in said
    assert "no connection" in page.read_text()


def test_an_answer_that_breaks_off_is_a_finding(capsys):
    status, said = prove(FailsOften(), capsys, "--json")
    assert status == 1
    found = [each["what"] for stage in json.loads(said)["stages"] for each in stage["findings"]]
    assert found
    assert all("no connection" in each or "broke off" in each for each in found), found


def test_the_first_finding_ends_it_and_the_page_shows_it(tmp_path, capsys):
    page = tmp_path / "report.html"
    status, said = prove(StaleBelow(), capsys, "--first", "--html", str(page))
    assert status == 1
    assert "after a restart" not in said
    assert "<h2>What differed</h2>" in page.read_text()


def test_a_restart_is_part_of_the_proof(tmp_path, capsys):
    status, said = prove(ToyEngine(), capsys, "--restart", f"touch {tmp_path}/restarted", "--json")
    assert status == 0
    assert (tmp_path / "restarted").exists()
    last = json.loads(said)["stages"][-1]
    assert last["name"] == "after a restart"
    assert last["is_tested"]
    assert last["reusing"] > 0


def test_a_restart_that_fails_is_a_finding_of_its_stage(capsys):
    status, said = prove(ToyEngine(), capsys, "--restart", "false", "--json")
    assert status == 1
    (finding,) = json.loads(said)["stages"][-1]["findings"]
    assert finding["what"] == "--restart: `false` ended with status 1"


def test_an_engine_that_dies_without_reuse_is_wrong():
    engine = FailsOnDemand()

    def begins(stage: str) -> None:
        engine.fails = stage == "nothing to reuse"

    with running(engine) as url:
        asked = Endpoint(url)
        asked.connect()
        proof = Proof(asked, Effort.short())
        proof.run(begins)
    assert {each.stage for each in proof.findings} == {"nothing to reuse"}
    assert report.status(proof) == report.WRONG


def test_an_interrupted_proof_proves_nothing(capsys, tmp_path, monkeypatch):
    """Its report shows the stages that it had."""
    page = tmp_path / "report.html"
    monkeypatch.setattr(Proof, "_convoy", interrupt)
    status, said = prove(ToyEngine(), capsys, "--html", str(page))
    assert status == 130
    assert "asked again at once" in said
    assert "NOT PROVEN: interrupted in stage 12, after" in said
    assert "RIGHT" not in said
    assert "NOT PROVEN: interrupted" in page.read_text()


def interrupt(proof: Proof) -> None:
    raise KeyboardInterrupt


def test_a_baseline_is_asked_as_the_engine_is(capsys):
    baseline = ToyEngine()
    with running(baseline) as url:
        status, said = prove(ToyEngine(), capsys, "--baseline", url)
    assert status == 0, said
    assert "beside a baseline of" in said
    assert baseline.bodies
    assert all(each.get("ignore_eos") for each in baseline.bodies)


def test_what_does_not_answer_is_one_sentence(capsys):
    assert main(["prove", "http://127.0.0.1:9", "--short"]) == 2
    assert main(["prove", "127.0.0.1:9", "--short"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "does not answer as an OpenAI API does" in first
    assert "write it as a URL" in second


def test_an_unusable_file_is_named_before_anything_is_asked(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").touch()
    for option, path, why in (
        ("--key-file", tmp_path / "missing", "No such file or directory"),
        ("--key-file", tmp_path / "binary", "it is not text in UTF-8"),
        ("--key-file", tmp_path / "empty", "its first line is empty; write the secret there"),
        ("--html", tmp_path / "missing" / "report.html", "No such file or directory"),
        ("--html", tmp_path, "Is a directory"),
    ):
        assert main(["prove", "http://127.0.0.1:9", "--short", option, str(path)]) == 2
        assert capsys.readouterr().err == f"lmtier: {option} {path}: {why}\n"


def test_an_answer_later_than_the_limit_is_none():
    with running(ToyEngine()) as url:
        engine = Endpoint(url, limit=0.0001)
        engine.limit = 5
        engine.connect()
        engine.limit = 0
        with pytest.raises(NoAnswer):
            engine.ask(Query("a b c"))


def test_an_answer_in_chunks_that_is_cut_is_none():
    with running(CutsChunks()) as url:
        engine = Endpoint(url)
        engine.connect()
        with pytest.raises(NoAnswer, match="broke off"):
            engine.ask(Query("a b c"))
        engine.cut(Query("a b c"), 5)


# ---- the parts

LIKELY = st.dictionaries(st.sampled_from("abcdefg"), st.floats(-9, 0), min_size=1)


def choice(*likeliest: dict[str, float]) -> list[Position]:
    return [Position(max(each, key=lambda token: each[token]), each) for each in likeliest]


@given(st.lists(LIKELY, min_size=1))
def test_an_answer_agrees_with_itself(likeliest):
    assert distance(choice(*likeliest), choice(*likeliest)) == 0


@given(st.lists(LIKELY, min_size=1), st.floats(0.01, 5))
def test_a_move_of_what_could_be_chosen_is_the_distance(likeliest, by):
    moved = [{token: value - by for token, value in each.items()} for each in likeliest]
    assert distance(choice(*likeliest), choice(*moved)) == pytest.approx(by)


def test_nothing_counts_after_the_first_different_token():
    mine = choice({"a": -0.10, "b": -0.11}, {"c": -0.1})
    theirs = choice({"a": -0.11, "b": -0.10}, {"d": -0.1})
    assert distance(mine, theirs) == pytest.approx(0.01)


def test_without_probabilities_any_change_is_infinitely_far():
    bare = [Position("a", {}), Position("b", {})]
    assert distance(bare, bare) == 0
    assert distance(bare, [Position("a", {}), Position("c", {})]) == math.inf
    assert distance(bare, bare[:1]) == math.inf


def test_the_limit_is_above_what_the_engine_does_alone():
    noise = Noise()
    assert 0 < noise.limit < 0.01
    noise.learn(0.2)
    assert noise.limit > 0.2


@pytest.mark.parametrize("writes_text", [True, False])
def test_prompts_share_only_the_wanted_beginning(writes_text):
    author = PromptWriter(3, writes_text=writes_text)
    made = author.prompt(800)
    whole = length(made.prompt)
    assert abs(whole - (800 if not writes_text else 615)) < 60
    words = parts(made.prompt)
    assert parts(author.prompt(800).prompt)[:2] != words[:2]
    parted = parts(author.diverging_after(made, 257))
    assert parted[:257] == words[:257]
    assert parted[257:300] != words[257:300]
    changes = [a != b for a, b in zip(words, parts(author.with_one_change(made, 0.15)), strict=True)]
    assert sum(changes) == 1
    assert changes.index(True) == int(0.15 * whole)


def parts(prompt: Any) -> list[Any]:
    return prompt.split(" ") if isinstance(prompt, str) else list(prompt)


def test_the_fact_that_is_asked_for_is_in_the_prompt_once():
    made = PromptWriter(5, writes_text=True).prompt(500, asks_for=1)
    assert str(made.prompt).count(made.code) == 1
    assert str(made.prompt).endswith("gate is")


def test_images_are_whole_and_differ():
    rows = []
    for number in (1, 2):
        data, found = image(number)[8:], {}
        while data:
            size = int.from_bytes(data[:4], "big")
            name, inside, check = data[4:8], data[8 : 8 + size], data[8 + size : 12 + size]
            assert zlib.crc32(name + inside) == int.from_bytes(check, "big")
            found[name], data = inside, data[12 + size :]
        assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
        rows.append(zlib.decompress(found[b"IDAT"]))
        assert len(rows[-1]) == 56 * (1 + 3 * 56)
    assert rows[0] != rows[1]
