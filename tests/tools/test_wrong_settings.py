"""What no setting can be, wherever it is given: one sentence, exit code 2, soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lmtier.config import first_line
from tests.certificates import certify
from tests.server.process import PATIENCE

# Each case in one process: what ends one with a traceback, or never, ends all.
RUN = """
import contextlib, io, json, os, sys
from lmtier.tools.cli import main
for argv, env in json.load(sys.stdin):
    before = dict(os.environ)
    os.environ.update(env)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(argv)
    os.environ.clear()
    os.environ.update(before)
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
CPU = "cpu://?capacity=1MiB"
DIGITS = "9" * 5_000


class Said(NamedTuple):
    code: int
    sentence: str


def run(cases: Sequence[tuple[Sequence[object], Mapping[str, str]]]) -> list[Said]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMTIER_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps([[[str(word) for word in argv], env] for argv, env in cases]),
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return [Said(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def need_sentences(said: Sequence[Said], words: Sequence[str]) -> None:
    assert len(said) == len(words)
    for each, word in zip(said, words, strict=True):
        assert (each.code, each.sentence.count("\n")) == (2, 1), each
        assert each.sentence.startswith("lmtier: ")
        assert word in each.sentence, each
        assert len(each.sentence) < 1_100


FILES = {
    "x = " + "[" * 50_000: "nested too deeply",
    "tiers = " + "[" * 3_000 + "]" * 3_000: "nested too deeply",
    "a = " + "{a=" * 20_000: "nested too deeply",
    ".".join("a" * 50_000) + " = 1": "too many dots",
    "[" + " . ".join("a" * 50_000) + "]": "too many dots",
    ".".join(['"a"'] * 50_000) + " = 1": "too many dots",
    '"#".' + ".".join(["'a'"] * 50_000) + " = 1": "too many dots",
    f"chunk_tokens = {DIGITS}": "digits",
    "chunk_tokens = 0x" + "f" * 100_000: "chunk_tokens=… from ",
    "shares = {a = 0x" + "f" * 100_000 + "}": "a share is a part of the room",
    'shares = {a = "1e999999999"}': "a share is a part of the room",
    "load_deadline = inf": "load_deadline=inf",
    "load_deadline = nan": "load_deadline=nan",
    "load_deadline = 1979-05-27": "is not a time; write it like 200ms, 30s or 7d, or as seconds",
    'load_deadline = "soon"': "'soon' from ",
    f'load_deadline = "{"9" * 39}s"': "the longest is 100 years",
    'load_deadline = "1' + " " * 100_000 + '!"': "is not a time",
    "queue_length = -5": "expected a whole number",
    'verify = "a\0b"': "Illegal character",
    'verify = "a\\u0000b"': "characters that can be printed",
    "verify = 'off'\nverify = 'off'": "Cannot overwrite a value",
    f"verify = '{'x' * (1 << 20)}'": "it has more than 256 KiB",
    f"verify = '{'x' * 200_000}'": "unknown verify='xxx",
    f"{'x' * 200_000} = 1": "unknown setting 'xxx",
    f"tiers = ['cpu://?capacity={DIGITS[:200]}GiB']": "is not a size",
    "tiers = ['cpu://?capacity=1e400GiB']": "is not a size",
    "tiers = ['cpu://?capacity=9EiB']": "is not a size",
    "tiers = ['cpu://?capacity=9000PiB']": "the largest is 8 EiB",
    f"tiers = ['cpu://?{'a' * 5_000}']": "more than 4096 letters",
    f"tiers = [{chr(39) + CPU + chr(39) + ','}" + "'null://', " * 10_000 + "]": "at most 32 are possible",
    f"tiers = ['{CPU}', 'disk:///a%00b?capacity=1MiB']": "characters that cannot be printed",
    f"tiers = ['{CPU}', 'null://?drive={DIGITS[:90]}&drive_writes_per_day=1']": "drive='999",
    "[serve]\nclients = 99999999999999999999": "clients=",
    f"[serve]\ngpu_hour = '{'1' * 60_000}'": "is no price",
    "[serve]\nlisten = '[::1]:99999'": "is not an address",
}


def test_a_file_that_cannot_be_is_one_sentence(tmp_path: Path):
    """Deep, huge, dotted, twice the same: for the command that shows settings and for the server."""
    cases: list[tuple[list[object], dict[str, str]]] = []
    for number, text in enumerate(FILES):
        (tmp_path / f"{number}.toml").write_text(text)
        command = "serve" if number % 2 else "config"
        cases.append(([command, "--config", tmp_path / f"{number}.toml"], {}))
    need_sentences(run(cases), list(FILES.values()))


def test_what_is_no_file_of_settings_is_one_sentence(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.toml").write_bytes(b"verify = '\xff'")
    (tmp_path / "no").mkdir()
    files = {
        tmp_path / "pipe": "it is a pipe, not a file",
        tmp_path / "no": "it is a directory, not a file",
        tmp_path / "none": "No such file",
        tmp_path / "latin.toml": "it is not text in UTF-8",
        Path("/dev/zero"): "it has more than 256 KiB",
    }
    said = run([(["config"], {"LMTIER_CONFIG_FILE": str(file)}) for file in files])
    need_sentences(said, list(files.values()))
    secret = ["serve", "--tier", CPU, "--listen", "127.0.0.1:0", "--http", "", "--token-file"]
    said = run([([*secret, file], {}) for file in ("/dev/zero", tmp_path / "no", tmp_path / "latin.toml")])
    need_sentences(said, ["it has more than 256 KiB", "it is a directory", "it is not text in UTF-8"])
    os.chmod(tmp_path / "pipe", 0o600)
    keys = [
        f"disk://{tmp_path}/kv?capacity=1MiB&seal=aes-256-gcm&key=file:{tmp_path}/{file}"
        for file in ("pipe", "no")
    ]
    tls = ["serve", "--tier", CPU, "--set", "serve.tls_cert=/dev/zero", "--set", "serve.tls_key=/dev/zero"]
    said = run([(tls, {}), *((["serve", "--tier", CPU, "--tier", url], {}) for url in keys)])
    need_sentences(said, ["/dev/zero: it is not a file", "it is a pipe, not a file", "it is a directory"])


OPTIONS = {
    "serve -t cpu://?capacity=1MiB --set load_deadline=soon": "is not a time; write it like 200ms",
    "serve -t cpu://?capacity=1MiB --set serve.grace=-1s": "is not a time; write it like 200ms",
    f"serve -t cpu://?capacity=1MiB --insecure --listen {'a' * 100}:0": "is not the name of a host",
    f"serve -t cpu://?capacity=1MiB --http= --listen= --unix /{'a' * 5_000}": "cannot listen on",
    "serve -t cpu://?capacity=1MiB --log-level loud": "argument --log-level",
    "serve -t cpu://?capacity=1MiB -t null://?latency=soon": "unknown option 'latency'",
    "serve -t cpu://?capacity=1MiB -t disk:///x?capacity=1MiB&readers=many": "readers='many' is not a size",
    "serve -t cpu://?capacity=1MiB -t disk:///x?capacity=1MiB&trust_others=maybe": "not true or false",
    "serve -t cpu://?capacity=1MiB -t redis://h?deadline=soon": "deadline='soon' is not a time; write it",
    "serve -t cpu://?capacity=1MiB -t redis://h?connections=9PiB": "threads are too many; at most 1024",
    "ping --wait soon": "argument --wait: 'soon' is not a time; write it like 200ms",
    "ping --wait nan": "argument --wait: 'nan' is not a time",
    f"explain --last {DIGITS}": "is not a whole number of up to 9 digits",
    "sessions --most -5000000": "must be 1 to",
    "pin x --name n --ttl soon": "argument --ttl: 'soon' is not a time; write it like 200ms",
    "pin x --name n --ttl 1e400": "argument --ttl: '1e400' is not a time",
    "prove http://h --limit soon": "argument --limit: 'soon' is not a time",
    f"clear --since {DIGITS}d": "is not a time",
    "simulate x -t cpu://?capacity=1MiB --prefill nan": "argument --prefill: 'nan' is not a number",
    "simulate x -t cpu://?capacity=1MiB --prefill inf": "argument --prefill: 'inf' is not a number",
    "simulate x -t cpu://?capacity=1MiB --latency cpu=soon": "--latency 'cpu': 'soon' is not a time",
    "simulate x -t cpu://?capacity=1MiB --bandwidth cpu=1e400": "--bandwidth 'cpu': '1e400' is not a size",
    "simulate x -t cpu://?capacity=1MiB --engine much": "argument --engine: 'much' is not a size",
    f"simulate --synthetic rag -t cpu://?capacity=1MiB --requests {DIGITS}": "is not a whole number",
    "size x --cpu much": "argument --cpu: 'much' is not a size; write it like 4GiB",
    "size x --cpu 9000PiB": "the largest is 8 EiB",
    "size x --tp 99999999999": "argument --tp",
    "size x --gpu-hour inf": "argument --gpu-hour: 'inf' is not a number",
    "config --set serve.grace=-1": "is not a time; write it like 200ms, 30s or 7d, or as seconds",
    "config --set load_deadline=-1": "is not a time; write it like 200ms, 30s or 7d, or as seconds",
    "config --set chunk_tokens=100000000": "must be 1 to 1048576",
    "size x --chunk-tokens 100000000": "must be 1 to 1048576",
    "simulate x -t cpu://?capacity=1MiB --chunk-tokens 100000000": "must be 1 to 1048576",
    "serve -t cpu://?capacity=1MiB -t disk:///x?capacity=1MiB&seal=": "seal= is empty; write its value, or",
    "serve -t cpu://?capacity=1MiB -t disk:///x?capacity=1MiB&key=": "key= is empty; write its value, or",
    "verify /nosuch": "/nosuch: No such file or directory; give the directory of a disk tier",
    "size x": "it has no 'num_attention_heads'",
    "prove http://127.0.0.1:9": "does not answer as an OpenAI API does: Connection refused; is that",
    "serve -t cpu://?capacity=966367641600000": ": 878.9 TiB is more than the ",
    "simulate --synthetic rag -t cpu://?capacity=1MiB": "is too small for one chunk of 32 MiB; give it",
    "stats 127.0.0.1:9": "'127.0.0.1:9' is no argument of lmtier stats; lmtier stats --help shows what is",
    "top a b": "'a' is no argument of lmtier top; lmtier top --help shows what is",
    "what": "there is no command 'what'; known: bench, clear, config",
}


def test_an_option_that_cannot_be_is_one_sentence(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("{}")
    said = run([(words.split(" "), {}) for words in OPTIONS])
    need_sentences(said, list(OPTIONS.values()))
    assert not Path("/x").exists()


@pytest.fixture(scope="module")
def pem(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pem")
    for name in ("own", "other"):
        certify(folder / f"{name}.crt", folder / f"{name}.key")
    encrypt = ["openssl", "ec", "-in", str(folder / "own.key"), "-aes256", "-passout", "pass:x", "-out"]
    subprocess.run([*encrypt, str(folder / "locked.key")], check=True, capture_output=True)
    (folder / "junk").write_text("junk")
    return folder


TLS = {
    ("junk", "own.key", ""): "junk: it has no certificate in PEM",
    ("own.crt", "junk", ""): "junk: it has no key in PEM without a passphrase",
    ("own.crt", "own.crt", ""): "own.crt: it has no key in PEM",
    ("own.crt", "locked.key", ""): "locked.key: it has no key in PEM without a passphrase",
    ("own.crt", "other.key", ""): "other.key: it is not the key of ",
    ("own.crt", "nosuch", ""): "nosuch: No such file or directory",
    ("own.crt", "own.key", "junk"): "junk: it has no certificate in PEM",
    ("own.crt", "own.key", "nosuch"): "nosuch: No such file or directory",
}


def test_of_the_files_of_tls_the_wrong_one_is_named(pem: Path):
    """By the server, by a command that asks one, and by a tier."""
    cases: list[list[str]] = []
    for cert, key, ca in TLS:
        files = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        settings = [f"serve.{name}={pem / file}" for name, file in files.items() if file]
        cases.append(["serve", "--tier", CPU, "--listen", "127.0.0.1:0", "--http", ""])
        cases[-1] += [word for setting in settings for word in ("--set", setting)]
        files = {"--cert": cert, "--key": key, "--ca": ca}
        options = [word for name, file in files.items() if file for word in (name, str(pem / file))]
        cases.append(["ping", "--server", "rediss://127.0.0.1:9", *options])
        files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": ca}
        query = "&".join(f"{name}={pem / file}" for name, file in files.items() if file)
        cases.append(["serve", "--tier", CPU, "--listen", "127.0.0.1:0", "--http", ""])
        cases[-1] += ["--tier", f"rediss://127.0.0.1:9?{query}"]
    need_sentences(run([(argv, {}) for argv in cases]), [words for words in TLS.values() for _ in range(3)])


def test_a_token_that_others_may_change_is_refused(tmp_path: Path, caplog):
    """The log names a token that others may read."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o646)
    said = run([(["serve", "--tier", CPU, "--listen", "127.0.0.1:0", "--token-file", token], {})])
    need_sentences(said, [f"token_file {token}: other users may write to it; chmod 600 it"])
    for mode in (0o600, 0o440, 0o644):
        token.chmod(mode)
        assert first_line("serve: token_file", token) == "secret"
        may_read = f"token_file {token}: other users may read it; chmod 600 it" in caplog.text
        assert may_read == (mode == 0o644)


def test_one_directory_for_two_disk_tiers_is_one_sentence(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    cases = [
        [
            *("serve", "--tier", CPU, "--tier", f"disk://{tmp_path}/kv?capacity=1MiB"),
            *("--tier", f"disk://{tmp_path}/{other}?capacity=2MiB&write=reused"),
        ]
        for other in ("kv", "./kv", "x/../kv", "link")
    ]
    words = f"two disk tiers have the directory {tmp_path}/kv; give each its own, or remove one"
    need_sentences(run([(argv, {}) for argv in cases]), [words] * len(cases))


def test_a_variable_that_cannot_be_is_one_sentence():
    variables = {
        "LMTIER_LOAD_DEADLINE": ("soon", "is not a time; write it like 200ms, 30s or 7d, or as seconds"),
        "LMTIER_CHUNK_TOKENS": (DIGITS, "chunk_tokens='999"),
        "LMTIER_VERIFY": ("\udcff", "characters that can be printed"),
        "LMTIER_TIERS": (CPU + "\udcff", "is not a size"),
        "LMTIER_SHARES": ("\udcff=.1", "is not text in UTF-8"),
        "LMTIER_SERVE_UNIX": ("\udcff", "characters that can be printed"),
    }
    said = run([(["config"], {name: value}) for name, (value, _) in variables.items()])
    need_sentences(said, [word for _, word in variables.values()])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "not JSON"),
        ("[1" + "0" * 5_000 + "]", "not JSON"),
        (
            '{"num_hidden_layers": 1000000000, "num_attention_heads": 1, "hidden_size": 1}',
            "1000000000 layers",
        ),
        ('{"num_hidden_layers": "many", "num_attention_heads": 1, "hidden_size": 1}', "not a configuration"),
        ('{"num_hidden_layers": 1e400, "num_attention_heads": 1, "hidden_size": 1}', "not a configuration"),
        ('{"num_hidden_layers": [], "text_config": 5, "num_attention_heads": {}}', "not a configuration"),
    ],
)
def test_a_model_that_cannot_be_is_one_sentence(tmp_path: Path, capsys, text: str, words: str):
    from lmtier.tools.cli import main

    (tmp_path / "config.json").write_text(text)
    said = Said(main(["size", str(tmp_path)]), capsys.readouterr().err)
    need_sentences([said], [words])
