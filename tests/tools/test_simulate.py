"""The simulator decides as the real cache does, reads the formats there are, and says what came of it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.layout import form_of, stored_size
from lmtier.rules.hints import END, WAIT, Action
from lmtier.rules.policy import POLICIES
from lmtier.testing import opaque_layout
from lmtier.tools.cli import main
from lmtier.tools.sim import report, synthetic, traces
from lmtier.tools.sim.bound import most_hits, set_bounds
from lmtier.tools.sim.recorded import read_recorded
from lmtier.tools.sim.replay import Hardware, ReplayResult, replay
from lmtier.tools.sim.traces import Trace, TraceRequest

CHUNK = 3 * 4096  # bytes, in the real cache of these tests
TOKENS = 256
RECORDED = Path(__file__).parents[1] / "traces" / "coding_agents.jsonl.gz"


@pytest.fixture
def trace() -> Trace:
    return synthetic.make("agentic", requests=150, seed=3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def real_hits(trace: Trace, urls: list[str]) -> list[dict[str, int]]:
    """What each request finds in a real cache, with bytes, threads and files."""
    layout = opaque_layout(CHUNK)
    layout = type(layout)(layout.layers, layout.dtype, TOKENS, TOKENS, layout.packing)
    form = form_of(layout, [layout.whole])
    found = []
    clock = Clock()
    with Cache(Config(chunk_tokens=TOKENS, tiers=urls, load_deadline=60), clock=clock) as cache:
        for request, keys in zip(trace.requests, trace.keys(TOKENS), strict=True):
            clock.now = request.at
            match = cache.wait(cache.match(keys, form, deadline=60))
            assert cache.flush()
            found.append({label: match.sources.count(label) * TOKENS for label in set(match.sources)})
            cache.release(match)
            cache.commit(cache.reserve(keys, form))
            assert cache.flush()
        cache.check()
    return found


def recorded(hints: str, waits_alone: bool = False) -> Trace:
    """Sessions of a coding agent; tests/traces/README.md names them."""
    trace = traces.read(RECORDED).hinted(hints)
    if not waits_alone:
        return trace
    waiting = [
        request._replace(hints=tuple(Action(hint.id, WAIT) for hint in request.hints))
        for request in trace.requests
    ]
    return replace(trace, requests=waiting)


@pytest.mark.parametrize("gib", [20, 60, 125])
def test_hints_never_cost_hits_of_recorded_agents(gib):
    """Ends; waits too; and waits of agents that never say that they end, which wait at their end."""
    ratios = [
        replay(trace, [f"cpu://?capacity={gib}GiB"], chunk_tokens=2048, bytes_per_token=128 << 10).hit_ratio
        for trace in (recorded("none"), recorded("ends"), recorded("waits"), recorded("waits", True))
    ]
    none, ends, waits, waits_alone = (100 * ratio for ratio in ratios)
    assert ends >= none
    assert waits >= ends - 0.05
    assert waits_alone >= none - 0.3


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=7),
    room=st.integers(1, 5),
)
def test_the_bound_is_what_the_best_choices_find(prompts, room):
    """Of all choices of what to keep; a prompt is found up to its first missing chunk."""
    chains = [[bytes(prompt[: depth + 1]) for depth in range(len(prompt))] for prompt in prompts]
    best = {frozenset[bytes](): 0}
    for chain in chains:
        after: dict[frozenset[bytes], int] = {}
        for kept, hits in best.items():
            hits += next((depth for depth, key in enumerate(chain) if key not in kept), len(chain))
            everything = kept | set(chain)
            for choice in combinations(sorted(everything), min(room, len(everything))):
                after[frozenset(choice)] = max(hits, after.get(frozenset(choice), 0))
        best = after
    assert most_hits(chains, room) == max(best.values())


def test_no_cache_finds_more_than_the_bound(trace):
    outcomes = [
        replay(
            trace, [f"cpu://?capacity={chunks * CHUNK}"], chunk_tokens=TOKENS, bytes_per_token=CHUNK / TOKENS
        )
        for chunks in (100, 700, 5000)
    ]
    set_bounds(outcomes, trace, TOKENS)
    small, *_ = pairs = [(outcome.hit_ratio, outcome.bound or 0.0) for outcome in outcomes]
    assert all(0 < found <= bound < 1 for found, bound in pairs)
    assert small[0] < small[1]
    assert "bound %" in report.report(outcomes)


def recording(folder: Path, name: str, relative: bool = True, start: float = 5.0) -> None:
    """A session of two requests an hour and a half apart, and a sub-agent of two."""

    def request(t: float, *blocks: int) -> dict[str, Any]:
        return {"type": "n", "t": t, "in": 64 * len(blocks) + 7, "out": 9, "hash_ids": blocks, "model": "m"}

    begin = 0.0 if relative else start
    inner = [request(begin, 71, 72, 73), request(begin + 2, 71, 72, 73, 74)]
    agent = {"type": "subagent", "t": start, "requests": inner, "tool_tokens": 64, "system_tokens": 64}
    session = {"id": name, "block_size": 64, "tool_tokens": 64, "system_tokens": 70}
    session["requests"] = [request(0, 1, 2, 3), agent, request(5400, 1, 2, 3, 4, 5)]
    (folder / f"{name}.json").write_text(json.dumps(session))


@pytest.mark.parametrize("relative", [True, False])
def test_recorded_sessions_run_as_users_begin_them(tmp_path, relative):
    for name in ("a", "b", "c"):
        recording(tmp_path, name, relative)
    trace = read_recorded(tmp_path, users=2, longest_gap=3600)
    found = [(each.at, each.session, each.parent) for each in trace.requests]
    times = {"": [0.0, 3607.0], "/1": [5.0, 7.0]}  # the gap after the sub-agent is cut to an hour
    wanted = [
        (start + at, f"{name}{agent}", agent and name)
        for name, start in (("a", 0.0), ("b", 0.0), ("c", 3607.0))
        for agent, each in times.items()
        for at in each
    ]
    assert sorted(found) == sorted(wanted)
    assert [at for at, *_ in found] == sorted(at for at, *_ in found)
    assert trace.block_tokens == 64


def test_recorded_sessions_share_tools_and_system_prompt(tmp_path):
    for name in ("a", "b"):
        recording(tmp_path, name)
    first, *_ = (trace := read_recorded(tmp_path, users=2, longest_gap=3600)).requests
    by_session = {request.session: request.blocks for request in trace.requests}
    a, b = by_session["a"], by_session["b"]
    assert a[:2] == b[:2] == first.blocks[:2]
    assert not {*a[2:]} & {*b[2:]}
    assert by_session["a/1"][:2] == by_session["b/1"][:2]
    assert not {*by_session["a/1"]} & {*a}, "another system prompt"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "no recorded session: Expecting property name"),
        ('{"id": "a", "requests": []}', "no recorded session: 'block_size' is missing"),
        ('{"id": "a", "block_size": 0, "requests": []}', "block_size is 0; all files need one size above 0"),
        ('{"id": "a", "block_size": 64, "requests": []}', "no requests"),
        ('{"id": "a", "block_size": 64, "requests": [{"type": "n"}]}', "'hash_ids' is missing"),
        ("[]", "no recorded session: list indices must be integers"),
    ],
)
def test_what_is_no_recording_is_one_sentence(tmp_path, capsys, content, why):
    (tmp_path / "one.json").write_text(content)
    assert main(["simulate", str(tmp_path), "-t", "cpu://?capacity=1GiB"]) == 2
    assert why in capsys.readouterr().err


def test_a_folder_of_recordings_is_simulated(tmp_path, capsys):
    for name in ("a", "b"):
        recording(tmp_path, name)
    words = [
        "simulate",
        str(tmp_path),
        "-t",
        "cpu://?capacity=1GiB",
        "--chunk-tokens",
        "64",
        "--hints",
        "ends",
    ]
    assert main([*words, "--users", "1"]) == 0
    assert "8 requests in 2 h" in capsys.readouterr().out
    (empty := tmp_path / "empty").mkdir()
    assert main(["simulate", str(empty), "-t", "cpu://?capacity=1GiB"]) == 2
    assert "there is no .json file in this folder" in capsys.readouterr().err


@pytest.mark.parametrize("write", ["always", "reused", "evicted", "auto", "auto&writes_per_day=1GiB"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_finds_exactly_what_the_real_cache_finds(trace, tmp_path, policy, write):
    rules = f"policy={policy}&write={write}"
    cpu = f"cpu://?capacity={700 * CHUNK}&policy={policy}"
    disk = f"capacity={2500 * stored_size(CHUNK)}&{rules}"
    simulated: list[dict[str, int]] = []
    outcome = replay(
        *(trace, [cpu, f"disk://?{disk}"]),
        chunk_tokens=TOKENS,
        bytes_per_token=CHUNK / TOKENS,
        heard=lambda cache, hits: simulated.append(dict(hits)),
    )
    assert simulated == real_hits(trace, [cpu, f"disk://{tmp_path}?{disk}"])
    assert outcome.hits["disk"] > 0
    assert outcome.hits["cpu"] > 0


def test_the_simulated_cache_is_sound_at_the_end(trace):
    def check(cache: Cache, _: object) -> None:
        if cache.index.used == cache.index.capacity:
            cache.check()

    urls = ["cpu://?capacity=300MiB", "disk://?capacity=1GiB&write=evicted"]
    replay(trace, urls, chunk_tokens=TOKENS, bytes_per_token=4096, heard=check)


def test_tokens_and_bytes_add_up():
    """A prompt that comes twice, and a disk from which nothing is needed."""
    trace = Trace("two", 256, [TraceRequest(0, 1000, 1, range(4)), TraceRequest(43_200, 1000, 1, range(4))])
    urls = ["cpu://?capacity=1GiB", "disk://?capacity=1GiB"]
    outcome = replay(
        *(trace, urls),
        chunk_tokens=256,
        bytes_per_token=1024,
        hardware=Hardware(prefill=1000, bandwidth={"cpu": 768 * 1024}, latency={"cpu": 0.5}),
    )
    assert outcome.hits == {"cpu": 768, "disk": 0}
    assert (outcome.requests, outcome.chunks, outcome.tokens) == (2, 6, 2000)
    assert outcome.hit_ratio == 768 / 2000
    assert outcome.written == {"disk": 3 * stored_size(256 * 1024)}
    assert outcome.read == {"disk": 0}
    assert outcome.written_per_day("disk") == 2 * outcome.written["disk"]
    assert outcome.ttft == [pytest.approx(1.0), pytest.approx(0.232 + 0.5 + 1.0)][:2]


def test_a_capacity_counts_whole_chunks_of_the_model():
    trace = Trace("one after another", 256, [TraceRequest(n, 256, 1, [n % 3]) for n in range(30)])
    for chunks, share in ((2, 0.0), (3, 0.9)):
        urls = [f"cpu://?capacity={chunks * 256 * 1024 + 1000}&policy=lru"]
        assert replay(trace, urls, chunk_tokens=256, bytes_per_token=1024).hit_ratio == share
    with pytest.raises(ConfigError, match="too small for one chunk"):
        replay(trace, ["cpu://?capacity=100KiB"], chunk_tokens=256, bytes_per_token=1024)


@pytest.mark.parametrize(
    "urls",
    [
        ["cpu://?capacity=1GiB&ttl=100s"],
        ["cpu://?capacity=600KiB", "disk://?capacity=1GiB&write=always&ttl=100s"],
    ],
)
def test_what_has_outlived_its_tier_is_computed_again(urls):
    """In the time of the trace. Others drive the first prompt out of the small memory."""
    times = (0, 0), (1, 1), (2, 2), (50, 0), (51, 1), (52, 2), (200, 0)
    trace = Trace("three prompts", 256, [TraceRequest(at, 256, 1, [prompt]) for at, prompt in times])
    found: list[int] = []
    replay(
        *(trace, urls),
        chunk_tokens=256,
        bytes_per_token=1024,
        heard=lambda cache, hits: found.append(sum(hits.values())),
    )
    assert found == [0, 0, 0, 256, 256, 256, 0]


# ---- the engine's GPU memory


def asked(*prompts: Sequence[int], apart: float = 1.0) -> Trace:
    requests = [TraceRequest(n * apart, 256 * len(each), 1, each) for n, each in enumerate(prompts)]
    return Trace("prompts", 256, requests)


def by_source(trace: Trace, *urls: str, **options: Any) -> list[dict[str, int]]:
    """How many chunks of each request come from where."""
    found: list[dict[str, int]] = []
    replay(
        *(trace, [*urls, "cpu://?capacity=1GiB"]),
        chunk_tokens=256,
        bytes_per_token=1024,
        heard=lambda cache, hits: found.append({label: n // 256 for label, n in hits.items()}),
        **options,
    )
    return found


CHUNK_OF_A_MODEL = 256 * 1024


def test_what_the_engine_has_itself_comes_from_no_tier():
    trace = asked([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3])
    assert by_source(trace) == [{}, {"cpu": 2}, {}, {"cpu": 3}]
    # Room for four chunks: the tail of the oldest prompt leaves first.
    assert by_source(trace, engine=4 * CHUNK_OF_A_MODEL) == [{}, {"engine": 2}, {}, {"engine": 2, "cpu": 1}]
    assert by_source(trace, engine=3 * CHUNK_OF_A_MODEL)[3] == {"engine": 1, "cpu": 2}
    outcome = replay(
        *(trace, ["cpu://?capacity=1GiB"]),
        chunk_tokens=256,
        bytes_per_token=1024,
        engine=4 * CHUNK_OF_A_MODEL,
    )
    assert (outcome.hit_tokens, outcome.tokens_not_computed) == (5 * 256, 256), (
        "the engine's own hits cost nothing anyway"
    )


def test_an_engine_that_forgets_loads_again():
    trace = asked([1, 2], [1, 2], [1, 2], [1, 2], apart=4.0)
    kept = by_source(trace, engine=1 << 30, engine_resets_every=7.0)
    assert kept == [{}, {"engine": 2}, {"cpu": 2}, {"engine": 2}]


def test_a_load_leaves_gpu_copies_as_a_real_one_does():
    gpu = f"gpu://?capacity={2 * CHUNK_OF_A_MODEL}&policy=lru"
    trace = asked([1, 2, 3], [1, 2, 3], [1, 2, 3], [7], [7], [1, 2])
    assert by_source(trace, gpu) == [
        *({}, {"cpu": 3}, {"gpu": 2, "cpu": 1}),  # there is room for the head only
        *({}, {"cpu": 1}, {"gpu": 1, "cpu": 1}),  # 7 was loaded, and took the place of 2
    ]
    # What the engine has itself leaves no copy.
    assert by_source(trace, gpu, engine=3 * CHUNK_OF_A_MODEL)[1] == {"engine": 3}


def test_a_copy_comes_faster_than_the_bus():
    trace = asked([1, 2], [1, 2], [1, 2])
    hardware = Hardware(prefill=1e9, bandwidth={"cpu": 1e6})
    gpu = f"gpu://?capacity={2 * CHUNK_OF_A_MODEL}"
    urls = [gpu, "cpu://?capacity=1GiB"]
    outcome = replay(trace, urls, chunk_tokens=256, bytes_per_token=1024, hardware=hardware)
    assert [round(each, 2) for each in outcome.ttft] == [0.0, 0.0, round(2 * CHUNK_OF_A_MODEL / 1e6, 2)]
    with pytest.raises(ConfigError, match="too small for one chunk"):
        replay(trace, ["gpu://?capacity=8KiB", urls[1]], chunk_tokens=256, bytes_per_token=1024)


# ---- traces


def line(at: float, tokens: int, blocks: list[int], **more: object) -> str:
    fields = {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": blocks}
    return json.dumps(fields | more) + "\n"


def test_mooncakes_format_is_read_packed_or_not(tmp_path):
    text = line(1000, 1100, [1, 2, 3]) + line(3500, 512, [1])
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        trace = traces.read(tmp_path / name)
        assert trace.block_tokens == 512
        assert [*trace.requests] == [TraceRequest(0.0, 1100, 7, (1, 2, 3)), TraceRequest(2.5, 512, 7, (1,))]
        assert trace.seconds == 2.5


def test_bailians_format_is_read_and_its_time_is_in_seconds(tmp_path):
    more = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1}
    prompts = [line(61.114, 521, [*range(33)], **more), line(62.114, 16 * 40, [*range(40)], **more)]
    (tmp_path / "b.jsonl").write_text("".join(prompts))
    trace = traces.read(tmp_path / "b.jsonl")
    assert trace.block_tokens == 16
    assert trace.seconds == pytest.approx(1.0)
    first, second = trace.keys(256)
    assert (len(first), len(second)) == (2, 2)
    assert first == second


def test_azures_format_shares_nothing(tmp_path):
    (tmp_path / "c.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,4808,10\n2023-11-16 18:15:50.9951690,4808,8\n"
    )
    trace = traces.read(tmp_path / "c.csv")
    assert trace.seconds == pytest.approx(4.314579)
    assert trace.tokens == 9616
    first, second = trace.keys(100)
    assert len(first) == 48
    assert not {*first} & {*second}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ("hello\nworld\n", "not a request in any known format: 'TIMESTAMP' is missing"),
        ('{"timestamp": 1}\n', "'input_length' is missing"),
        ('{"timestamp": 1\n', "not a request in any known format"),
        (line(0, 100, [1]), "--block-tokens"),
        (line(0, 100, [1, 2]) + line(0, 900, [1, 2]), "--block-tokens"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path, text, words):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match=words):
        traces.read(tmp_path / "x")
    with pytest.raises(ConfigError, match="No such file"):
        traces.read(tmp_path / "y")


def test_a_chunk_is_some_blocks_or_a_part_of_one():
    trace = Trace("x", 512, [TraceRequest(0, 2048, 1, (1, 2, 3, 4)), TraceRequest(0, 2000, 1, (1, 2, 9, 4))])
    for chunk_tokens, lengths, shared in (
        (512, [4, 3], 2),
        (256, [8, 7], 4),
        (1024, [2, 1], 1),
        (2048, [1, 0], 0),
    ):
        first, second = trace.keys(chunk_tokens)
        assert [len(first), len(second)] == lengths
        assert len({*first} & {*second}) == shared
    assert [len(keys) for keys in trace.keys(512, partial=True)] == [4, 4]
    with pytest.raises(ConfigError, match="take a multiple"):
        next(trace.keys(300))


@pytest.mark.parametrize("chunk_tokens", [256, 512, 1024])
def test_a_prompt_without_blocks_shares_nothing(chunk_tokens):
    trace = Trace("x", 512, [TraceRequest(0, 2048, 1, ()), TraceRequest(0, 2048, 1, ())])
    first, second = trace.keys(chunk_tokens)
    assert len({*first, *second}) == 2 * 2048 // chunk_tokens


def test_a_key_names_all_that_comes_before_it():
    trace = Trace("x", 16, [TraceRequest(0, 32, 1, (1, 2)), TraceRequest(0, 32, 1, (3, 2))])
    first, second = trace.keys(16)
    assert not {*first} & {*second}


# ---- made-up traffic


@pytest.mark.parametrize("shape", synthetic.SHAPES)
def test_the_same_seed_gives_the_same_traffic(shape):
    one, same, other = (synthetic.make(shape, requests=200, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.requests != other.requests
    assert len(one.requests) == 200
    assert all(before.at <= after.at for before, after in pairwise(one.requests))
    for request in one.requests:
        assert len(request.blocks) == -(-request.tokens // one.block_tokens)


def test_each_shape_is_shared_in_its_own_way():
    ratios = {
        shape: replay(
            *(synthetic.make(shape, requests=600, seed=1), ["cpu://?capacity=4TiB"]),
            chunk_tokens=256,
            bytes_per_token=131_072,
        ).hit_ratio
        for shape in synthetic.SHAPES
    }
    assert ratios["rag"] < 0.3 < 0.6 < ratios["multi-turn"] < ratios["agentic"]


# ---- the command


def test_a_comma_makes_one_configuration_of_each():
    urls = ["cpu://?capacity=1GiB,2GiB", "disk://?capacity=1TiB&write=always"]
    made = report.variants(urls, "lru,auto", "reused")
    assert len(made) == 4
    assert made[0] == ["cpu://?capacity=1GiB&policy=lru", "disk://?capacity=1TiB&policy=lru&write=reused"]
    assert made[-1] == ["cpu://?capacity=2GiB&policy=auto", "disk://?capacity=1TiB&policy=auto&write=reused"]
    assert report.variants(["cpu://?capacity=1GiB"]) == [["cpu://?capacity=1GiB"]]


def test_the_command_prints_one_row_for_a_configuration(capsys, tmp_path):
    """It draws a plot as well."""
    argv = ["simulate", "--synthetic", "rag", "--requests", "50", "-t", "cpu://?capacity=1GiB,4GiB"]
    argv += ["-t", "disk://?capacity=8GiB", "--policy", "lru,auto", "--plot", str(tmp_path / "p.svg")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    for row in ("cpu 1 GiB lru + disk 8 GiB lru always", "cpu 4 GiB auto + disk 8 GiB auto always"):
        assert row in out
    drawn = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert len(drawn.findall("{*}polyline")) == 2
    assert len(drawn.findall("{*}circle")) == 4


def test_the_table_has_a_column_for_each_source(capsys):
    argv = ["simulate", "--synthetic", "multi-turn", "--requests", "50", "--engine", "1GiB"]
    argv += ["--forgets", "1m", "-t", "gpu://?capacity=1GiB,2GiB", "-t", "cpu://?capacity=4GiB"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "gpu 1 GiB auto + cpu 4 GiB auto" in out
    header = next(line for line in out.splitlines() if line.startswith("tiers"))
    assert [word for word in header.split() if word in ("gpu", "engine", "cpu", "read")] == [
        *("engine", "gpu", "cpu")
    ]


def test_json_has_what_the_table_has(capsys):
    argv = ["simulate", "--synthetic", "rag", "--requests", "50", "-t", "cpu://?capacity=4GiB", "--json"]
    assert main(argv) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["requests"] == 50
    assert found["hit_ratio"] == sum(found["hit_tokens"].values()) / found["tokens"]
    assert found["ttft_seconds"]["p50"] <= found["ttft_seconds"]["p99"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-t", "cpu://?capacity=1GiB&policy=fifo"], "unknown policy=fifo"),
        (["-t", "disk://?capacity=1GiB"], "exactly one cpu:// tier"),
        (["-t", "cpu://?capacity=1GiB", "--plot", "x.gif"], "name a .svg file"),
        (["-t", "cpu://?capacity=1GiB", "--bandwidth", "cpu"], "write it as tier=value"),
        (["-t", "cpu://?capacity=1GiB", "--requests", "0"], "must be more than 0"),
        (["-t", "cpu://?capacity=1GiB", "--bytes-per-token", "0"], "--bytes-per-token 0: must be more"),
        (["-t", "cpu://?capacity=1GiB", "--bandwidth", "dsk=1GB"], "dsk: there is no such tier, only cpu"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys, more, words):
    assert main(["simulate", "--synthetic", "rag", *more]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_chance_does_not_leak_into_the_caller():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    synthetic.make("rag", requests=10, seed=1)
    assert random.random() == expected


# ---- sessions, hints and money


def agents(*, ends: bool = False) -> Trace:
    """Sessions of eight blocks each; two of them take turns, and the others ask once."""
    requests = []
    for turn in range(60):
        name = f"once{turn}" if turn % 3 else f"s{turn % 2}"
        hints = (Action(f"{turn}", END),) if ends and (name.startswith("once") or turn >= 54) else ()
        blocks = [f"{name}-{n}" for n in range(8)]
        requests.append(TraceRequest(float(turn), 8 * TOKENS, 1, blocks, name, "", hints))
    return Trace("agents", TOKENS, requests)


def hits_of(trace: Trace) -> int:
    url = f"cpu://?capacity={20 * CHUNK}&policy=lru"
    return replay(trace, [url], chunk_tokens=TOKENS, bytes_per_token=CHUNK / TOKENS).hit_tokens


def test_hints_of_a_trace_are_executed_by_the_real_cache():
    trace = agents(ends=True)
    plain = trace.hinted("none")
    assert not any(request.session or request.hints for request in plain.requests)
    assert hits_of(trace) > hits_of(plain)
    assert hits_of(agents().hinted("ends")) == hits_of(trace)


def test_ends_and_waits_are_taken_from_what_comes_next():
    requests = [TraceRequest(at, 9, 1, [at], "one") for at in (0.0, 1.0, 30.0)]
    trace = Trace("t", 9, [*requests, TraceRequest(31.0, 9, 1, [4.0])])
    kinds = [[hint.type for hint in request.hints] for request in trace.hinted("waits").requests]
    assert kinds == [[], ["session_wait"], ["session_end"], []]
    assert [len(each.hints) for each in trace.hinted("ends").requests] == [0, 0, 1, 0]
    assert [len(each.hints) for each in trace.hinted("waits", 0.5).requests] == [1, 1, 1, 0]


def test_sessions_and_hints_are_read_from_a_trace(tmp_path):
    hint = {"action_type": "session_wait", "payload": {"for": "tool"}}
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    more = {"session_id": "s", "parent_session_id": "p", "hints": [hint]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line | more) + "\n" + json.dumps(line))
    first, second = traces.read(tmp_path / "t.jsonl", block_tokens=512).requests
    assert (first.session, first.parent, second.session) == ("s", "p", "")
    assert [(each.type, each.payload) for each in first.hints] == [("session_wait", {"for": "tool"})]


def test_the_command_says_what_hints_and_hits_are_worth(tmp_path, capsys):
    lines = [
        {
            "timestamp": 1000 * request.at,
            "input_length": request.tokens,
            "output_length": 1,
            "hash_ids": list(request.blocks),
            "session_id": request.session,
        }
        for request in agents().requests
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["simulate", str(tmp_path / "t.jsonl"), "-t", "cpu://?capacity=6MiB,12MiB&policy=lru"]
    words += ["--bytes-per-token", "1KiB", "--block-tokens", "256"]
    plot = tmp_path / "plot.svg"
    assert main([*words, "--hints", "none,ends", "--gpu-hour", "3.6", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "what hints are worth" in out
    assert "what hits save" in out
    assert "hints: ends" in plot.read_text()
    assert main([*words, "--hints", "ends", "--gpu-hour", "3.6", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert small["hints"] == {"which": "ends", "executed": 42}
    tokens = sum(large["hit_tokens"].values())
    assert large["saved"]["money"] == pytest.approx(tokens / 10_000 / 3600 * 3.6)
    assert main([*words, "--hints", "end"]) == 2
    assert "did you mean 'ends'" in capsys.readouterr().err
    assert main([*words, "--gpu-hour", "-1"]) == 2


def test_hints_need_a_trace_with_sessions(capsys):
    words = ["simulate", "--synthetic", "rag", "--requests", "5", "-t", "cpu://?capacity=1GiB"]
    assert main([*words, "--hints", "ends"]) == 2
    assert "no session_id" in capsys.readouterr().err


def test_lifetimes_are_rules_that_tell_variants_apart(capsys):
    words = ["simulate", "--synthetic", "rag", "--requests", "20", "--gpu-hour", "1"]
    words += ["-t", "cpu://?capacity=1GiB,2GiB&ttl=1h,2h", "-t", "disk://?capacity=4GiB&codec=shuffle-zstd"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "cpu 1 GiB auto ttl 3600s + disk 4 GiB auto always" in said
    assert "cpu 2 GiB auto ttl 7200s + disk 4 GiB auto always" in said
    assert "every chunk has its full size, whatever codec= says" in said


def test_the_next_gib_is_worth_the_step_to_a_larger_variant():
    def outcome(gib: int, ratio: float) -> ReplayResult:
        made = ReplayResult(
            Config(tiers=[f"cpu://?capacity={gib}GiB"]).cache_tiers, 86_400.0, 1.0, tokens=3_600_000
        )
        made.hits = {"cpu": round(ratio * made.tokens)}
        return made

    small, middle, large = outcome(1, 0.1), outcome(2, 0.2), outcome(4, 0.3)
    found = [
        report.next_gib_of(each, [large, small, middle], Hardware(prefill=1.0), 2.0)
        for each in (small, middle, large)
    ]
    assert [each and round(each.money, 6) for each in found] == [200.0, 100.0, None]


def test_an_interrupted_simulation_shows_what_it_replayed(capsys, monkeypatch, tmp_path):
    replayed: list[Any] = []

    def until_the_second(*args: Any, **options: Any) -> ReplayResult:
        if replayed:
            raise KeyboardInterrupt
        replayed.append(args)
        return replay(*args, **options)

    monkeypatch.setattr("lmtier.tools.sim.replay.replay", until_the_second)
    tier = "cpu://?capacity=1GiB"
    traffic = ["--synthetic", "rag", "--requests", "50"]
    assert main(["simulate", *traffic, "--tier", tier, "--policy", "lru,auto"]) == 130
    out, err = capsys.readouterr()
    assert "cpu 1 GiB lru " in out
    assert "cpu 1 GiB auto " not in out
    assert err == "lmtier: interrupted: this is what was known by then\n"
    plot = tmp_path / "hits.svg"
    assert main(["simulate", *traffic, "--tier", tier, "--plot", str(plot)]) == 130, "before the first one"
    assert not plot.exists()
