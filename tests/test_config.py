"""Settings: what may be written, who wins, and what an error says."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtier.config import (
    Config,
    ServerConfig,
    TierSpec,
    first_line,
    host_and_port,
    load,
    load_server,
    parse_seconds,
    parse_size,
    suggest,
)
from lmtier.errors import ConfigError, without_secrets

CPU = "cpu://?capacity=1GiB"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("1b", 1),
        ("1k", 1 << 10),
        ("1K", 1 << 10),
        ("16MB", 16_000_000),
        ("1kb", 1000),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("2T", 2 << 40),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes_read_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 GiB GiB", "4XiB", "1e9", "0x10", "1,000"])
def test_what_is_not_a_size_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match="4GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 53))
def test_plain_bytes_are_exact_up_to_8_pib(nbytes):
    assert parse_size(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200us", 2e-4),
        ("200ms", 0.2),
        ("2", 2.0),
        (2.5, 2.5),
        ("2s", 2.0),
        ("3m", 180),
        ("1h", 3600),
        ("7d", 604800),
    ],
)
def test_durations_read_as_people_write_them(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-2s", "2 weeks", "soon"])
def test_what_is_not_a_duration_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match="200ms"):
        parse_seconds(text)


@pytest.mark.parametrize("rest", [b"", b"\n", b"\r\n", b"\r\nwhat it is for\r\n"])
def test_a_secret_is_the_first_line_of_its_file(tmp_path, rest):
    (tmp_path / "salt").write_bytes(" ein Gewürz ".encode() + rest)
    assert first_line("--salt-file", tmp_path / "salt") == " ein Gewürz "


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n", b"\r\na secret\r\n"])
def test_a_file_whose_first_line_is_empty_is_refused(tmp_path, content):
    (tmp_path / "salt").write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        first_line("--salt-file", tmp_path / "salt")
    path = tmp_path / "salt"
    assert str(refusal.value) == f"--salt-file {path}: its first line is empty; write the secret there"


def test_a_suggestion_is_close_or_lists_everything():
    assert suggest("chunk_token", ["chunk_tokens", "verify"]) == "; did you mean 'chunk_tokens'?"
    assert suggest("zzz", ["b", "a"]) == "; known: a, b"


# ---- who wins


def test_defaults_make_a_configuration():
    config, origins = load(env={})
    assert config == Config()
    assert set(origins.values()) == {"default"}


def test_later_sources_win_and_origins_say_so(tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text('chunk_tokens = 64\nverify = "off"\nqueue_length = 7\n')
    env = {"LMTIER_CHUNK_TOKENS": "128", "LMTIER_VERIFY": "always", "OTHER": "x"}
    config, origins = load(file, env, {"chunk_tokens": 512})
    assert (config.chunk_tokens, config.verify, config.queue_length) == (512, "always", 7)
    assert origins["chunk_tokens"] == "arguments"
    assert origins["verify"] == "environment"
    assert origins["queue_length"] == str(file)
    assert origins["load_deadline"] == "default"


def test_the_environment_names_the_file(tmp_path):
    file = tmp_path / "any-name.toml"
    file.write_text(f'tiers = ["{CPU}"]\nload_deadline = "200ms"\n')
    config, origins = load(env={"LMTIER_CONFIG_FILE": str(file)})
    assert config.load_deadline == pytest.approx(0.2)
    assert origins["tiers"] == str(file)


@pytest.mark.parametrize("joint", [" ", "  ", "\n"])
def test_tiers_in_one_string_are_separated_by_spaces(joint):
    urls = (CPU, "disk:///a?capacity=1GiB&write=reused")
    config, _ = load(env={"LMTIER_TIERS": joint.join(urls)})
    assert config.tiers == urls


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("1", True), ("yes", True), ("False", False), ("0", False)]
)
def test_switches_read_as_people_write_them(word, value):
    config, _ = load(env={"LMTIER_PREFAULT": word})
    assert config.prefault is value


def test_a_configuration_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().chunk_tokens = 1  # type: ignore[misc]


# ---- what an error says


@pytest.mark.parametrize(
    ("env", "overrides", "words"),
    [
        ({}, {"chunk_token": 8}, ["'chunk_token'", "arguments", "did you mean 'chunk_tokens'"]),
        (
            {"LMTIER_CHUNK_TOKEN": "8"},
            {},
            ["'LMTIER_CHUNK_TOKEN'", "environment", "did you mean 'LMTIER_CHUNK_TOKENS'"],
        ),
    ],
)
def test_an_unknown_setting_is_named_with_a_suggestion(env, overrides, words):
    with pytest.raises(ConfigError) as error:
        load(env=env, overrides=overrides)
    assert all(word in str(error.value) for word in words)


def test_an_unknown_setting_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text("tires = []\n")
    with pytest.raises(ConfigError, match=r"'tires' in .*lmtier\.toml; did you mean 'tiers'"):
        load(file, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_tokens", "many"),
        ("chunk_tokens", 2.5),
        ("chunk_tokens", True),
        ("chunk_tokens", "-8"),
        ("load_deadline", "soon"),
        ("load_deadline", None),
        ("prefault", "maybe"),
        ("prefault", 2),
        ("tiers", 5),
    ],
)
def test_a_wrong_type_names_its_setting_value_and_place(name, value):
    with pytest.raises(ConfigError, match=f"{name}=.* from arguments does not fit"):
        load(env={}, overrides={name: value})


@pytest.mark.parametrize("text", ["chunk_tokens = ", "= 3", '"'])
def test_a_file_that_is_no_toml_is_named(tmp_path, text):
    file = tmp_path / "lmtier.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"configuration file .*lmtier\.toml"):
        load(file, {})


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml", {})


# What hypothesis makes of these is given as an argument, in the environment and in a file.
NUMBERS = st.text("0123456789.e+- GiBsmhd", max_size=12)
ODD = st.one_of(
    *(st.text(max_size=9), st.floats(), st.booleans(), st.none(), st.dates(), NUMBERS),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from(["9" * 5_000, 1 << 20_000]),
    NUMBERS.map("cpu://?capacity={}".format),
)
ODDS = st.one_of(ODD, st.lists(ODD, max_size=3), st.dictionaries(st.text(max_size=3), ODD, max_size=2))
NAMES = st.sampled_from(
    [each.name for each in (*dataclasses.fields(Config), *dataclasses.fields(ServerConfig))]
)


def one_sentence(read) -> None:
    """Whatever is given, it is settings or one short line."""
    said = ""
    try:
        read()
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1, said
    assert len(said) < 5_000, said


def written(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # more digits than Python writes
        return "9" * 6_021


@given(st.dictionaries(NAMES, ODDS, max_size=3))
def test_any_value_is_a_setting_or_one_sentence(given):
    for cls, reads in ((Config, load), (ServerConfig, load_server)):
        own = {each.name for each in dataclasses.fields(cls)} & given.keys()
        one_sentence(lambda own=own, reads=reads: reads(None, {}, {name: given[name] for name in own}))
        texts = {f"LMTIER_{name.upper()}": written(given[name]) for name in own}
        one_sentence(lambda texts=texts, reads=reads: reads(None, texts))


@given(st.lists(st.sampled_from([*"[]{}.=\"'#\n ,-1", "serve", "tiers", "inf"]), max_size=30).map("".join))
def test_any_file_is_settings_or_one_sentence(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(text, "utf-8", "replace")
    one_sentence(lambda: load(file, {}))
    one_sentence(lambda: load_server(file, {}))


@pytest.mark.parametrize("read", [load, load_server])
def test_a_wrong_time_says_how_to_write_one(read):
    name = "load_deadline" if read is load else "grace"
    with pytest.raises(ConfigError) as error:
        read(None, {}, {name: "soon"})
    how = "it is not a time; write it like 200ms, 30s or 7d, or as seconds"
    assert str(error.value) == f"{name}='soon' from arguments does not fit: {how}"


def test_an_unfit_list_of_tiers_shows_no_password():
    with pytest.raises(ConfigError) as error:
        load(None, {}, {"tiers": ["redis://:hunter2@host", 5]})
    assert str(error.value) == (
        "tiers=… from arguments does not fit: expected a list of URLs, or one text with spaces between them"
    )


def test_a_secret_comes_through_a_pipe_too(tmp_path):
    reads, writes = os.pipe()
    os.write(writes, b"a secret\nand what it is for")  # it stays open: only the first line is waited for
    assert first_line("--token-file", f"/dev/fd/{reads}") == "a secret"
    os.close(reads)
    os.close(writes)


# ---- combinations that cannot work


@pytest.mark.parametrize(
    "tiers",
    [
        [],
        ["disk:///a?capacity=1GiB"],
        [CPU, CPU],
        ["disk:///a?capacity=1GiB", CPU],
        ["gpu://?capacity=1MiB"],
        ["gpu://?capacity=1MiB", "disk:///a?capacity=1GiB", CPU],
        ["gpu://?capacity=1MiB", "gpu://?capacity=1MiB", CPU],
        [CPU, "gpu://?capacity=1MiB"],
    ],
)
def test_there_is_one_cpu_tier_above_every_other(tiers):
    with pytest.raises(ConfigError, match="exactly one cpu:// tier, above"):
        Config(tiers=tiers)


def test_a_gpu_tier_is_no_larger_than_what_it_copies():
    config = Config(tiers=["gpu://?capacity=1GiB&policy=lru", "cpu://?capacity=1GiB"])
    assert config.gpu is not None
    assert (config.gpu.capacity, config.gpu.policy) == (1 << 30, "lru")
    assert [spec.scheme for spec in config.cache_tiers] == ["cpu"]
    with pytest.raises(ConfigError, match="is larger than 'cpu://"):
        Config(tiers=["gpu://?capacity=2GiB", "cpu://?capacity=1GiB"])


@pytest.mark.parametrize("tiers", [["cpu://"], [CPU, "disk:///a"], ["gpu://", CPU]])
def test_a_tier_that_is_bounded_needs_its_bound(tiers):
    with pytest.raises(ConfigError, match="needs a capacity"):
        Config(tiers=tiers)
    with pytest.raises(ConfigError, match=r"needs a capacity.*; 'capacty' is no option of it"):
        Config(tiers=[each + "?capacty=1GiB" if "?" not in each else each for each in tiers])


def test_a_relative_directory_is_refused(tmp_path, monkeypatch):
    """The error shows the absolute one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"'disk://kv.*': .*is relative.*write disk://{tmp_path}/kv$"):
        Config(tiers=[CPU, "disk://kv?capacity=1GiB"])
    assert Config(tiers=[CPU, "disk://~/kv?capacity=1GiB"]).cache_tiers[1].location == "~/kv"


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_tokens": 0},
        {"chunk_tokens": -256},
        {"queue_length": 0},
        {"load_deadline": 0.0},
        {"verify": "sometimes"},
    ],
)
def test_values_that_cannot_work_name_their_setting(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(ConfigError, match=name):
        Config(**wrong)


# ---- a tier's URL


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("cpu://?capacity=1GiB", "cpu://?capacity=1GiB"),
        ("disk:///data/a@b?capacity=1GiB", "disk:///data/a@b?capacity=1GiB"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:hunter2@host:6379/0?ttl=7d", "redis://***@host:6379/0?ttl=7d"),
        ("redis://user:hunter2@host", "redis://***@host"),
        ("redis://user:hunt@er/2@host", "redis://***@host"),
        ("redis://host?password=hunter2&ttl=7d", "redis://host?password=***&ttl=7d"),
        ("redis://host?ttl=7d&Auth_Token=hunter2", "redis://host?ttl=7d&Auth_Token=***"),
        ("s3://bucket?secret_access_key=hunter2", "s3://bucket?secret_access_key=***"),
        ("redis://host?p%61ssword=hunter2", "redis://host?p%61ssword=***"),
        ("rediss://host?ssl_keyfile=/etc/key.pem", "rediss://host?ssl_keyfile=/etc/key.pem"),
        ("redis://host:6379?username=me@here&ttl=7d", "redis://host:6379?username=me@here&ttl=7d"),
        ("s3://bucket?endpoint=http://u:hunter2@h:9&ttl=7d", "s3://bucket?endpoint=http://***@h:9&ttl=7d"),
        ("far://host?auth=hunter2&cred=hunter2&size=2", "far://host?auth=***&cred=***&size=2"),
        (
            "mooncake://host?metadata=http://h/m?token=hunter2",
            "mooncake://host?metadata=http://h/m?token=***",
        ),
    ],
)
def test_urls_are_shown_without_secrets(url, shown):
    assert without_secrets(url) == shown
    assert str(TierSpec.parse(url)) == f"tier {shown!r}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunt?er2@host:6379/0?ttl=7d", "***@host:6379/0?ttl=7d"),
        ("redis://:hunt?er=2@host", "***@host"),
        ("redis://user:hunt?er=2&x@host", "***@host"),
        ("redis://host&password=hunter?2&ttl=7d", "host&password=***&ttl=7d"),
    ],
)
def test_a_secret_that_was_not_quoted_is_not_shown_either(url, shown):
    assert without_secrets(url) == f"redis://{shown}"
    for wrong in url.replace("://", ":"), url.replace("redis://", ""), url.replace("redis", "my redis"):
        assert without_secrets(wrong).endswith(shown)
        assert "hunt" not in without_secrets(wrong)


@pytest.mark.parametrize("option", ["auth", "cred", "access_key", "pass%77ord"])
@pytest.mark.parametrize("wrong", ["write=sometimes", "ttl=soon", "capacity=0", "capacity", "size=2&size=2"])
def test_an_error_about_a_tier_does_not_show_its_secrets(option, wrong):
    with pytest.raises(ConfigError) as refusal:
        TierSpec.parse(f"far://host?{option}=hunter2&{wrong}")
    assert f"tier 'far://host?{option}=***&{wrong}'" in str(refusal.value)


def test_a_url_is_taken_apart():
    spec = TierSpec.parse("disk:///var/lib/lmtier?capacity=500GiB&write=reused&policy=lru&readers=8")
    assert (spec.scheme, spec.location, spec.capacity) == ("disk", "/var/lib/lmtier", 500 << 30)
    assert (spec.write, spec.policy, spec.options) == ("reused", "lru", {"readers": "8"})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/var/lib/lmtier", "not a URL"),
        ("disk:/var", "not a URL"),
        ("disk:///a?capacity", "name=value"),
        ("disk:///a?capacity=1GiB&capacity=2GiB", "given twice"),
        ("disk:///a?capacity=much", "'much' is not a size"),
        ("disk:///a?capacity=0", "holds nothing"),
        ("disk:///a?capacity=1GiB&write=alway", "did you mean 'always'"),
        ("disk:///a?capacity=1GiB&policy=lruu", "did you mean 'lru'"),
    ],
)
def test_a_url_that_cannot_be_read_says_why(url, words):
    with pytest.raises(ConfigError, match=words):
        TierSpec.parse(url)


# ---- a server's settings


def test_a_server_is_for_this_host_alone_by_default():
    serving, origins = load_server(env={})
    assert serving == ServerConfig()
    assert (serving.listen, serving.http, serving.unix) == ("127.0.0.1:6380", "127.0.0.1:9470", "")
    assert (serving.token_file, serving.tls_cert, serving.insecure) == ("", "", False)
    assert set(origins.values()) == {"default"}


def test_a_server_has_its_own_table_and_variables(tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text('chunk_tokens = 64\n[serve]\nlisten = "[::1]:7000"\ngrace = "2m"\nclients = 5\n')
    env = {"LMTIER_SERVE_CLIENTS": "7", "LMTIER_SERVE_INSECURE": "yes", "LMTIER_VERIFY": "off"}
    serving, origins = load_server(file, env, {"http": ":9999"})
    assert (serving.listen, serving.grace, serving.clients, serving.http) == ("[::1]:7000", 120.0, 7, ":9999")
    assert serving.insecure is True
    assert (origins["listen"], origins["clients"]) == (str(file), "environment")
    assert (origins["http"], origins["patience"]) == ("arguments", "default")
    config, _ = load(file, env)
    assert (config.chunk_tokens, config.verify) == (64, "off")


def test_a_token_is_a_variable_and_no_setting():
    assert load(env={"LMTIER_TOKEN": "word"})[0] == Config()
    assert load_server(env={"LMTIER_TOKEN": "word"})[0] == ServerConfig()


def of_kubernetes(service: str, ports: dict[str, int]) -> dict[str, str]:
    """The variables that the kubelet gives to each container in the namespace of a Service."""
    host, (first, *_) = "10.96.7.1", ports.values()
    found = {f"{service}_SERVICE_HOST": host, f"{service}_SERVICE_PORT": str(first)}
    found |= {f"{service}_PORT": f"tcp://{host}:{first}"}
    for name, port in ports.items():
        one = f"{service}_PORT_{port}_TCP"
        found |= {f"{service}_SERVICE_PORT_{name}": str(port), one: f"tcp://{host}:{port}"}
        found |= {f"{one}_PROTO": "tcp", f"{one}_PORT": str(port), f"{one}_ADDR": host}
    return found


@pytest.mark.parametrize("service", ["LMTIER", "LMTIER_REDIS", "LMTIER_SERVE", "LMTIER_SERVE_2"])
def test_variables_of_a_kubernetes_service_are_no_settings(service):
    env = of_kubernetes(service, {"REDIS": 6380, "HTTP": 9470}) | {"LMTIER_CHUNK_TOKENS": "64"}
    assert load(env=env)[0] == Config(chunk_tokens=64)
    assert load_server(env=env)[0] == ServerConfig()
    with pytest.raises(ConfigError, match="unknown setting"):  # a port alone is a mistake
        load_server(env={"LMTIER_SERVE_PORT": "6380"})


@pytest.mark.parametrize(
    ("env", "overrides", "words"),
    [
        ({"LMTIER_SERVE_LISEN": ":1"}, {}, "'LMTIER_SERVE_LISEN' in environment; did you mean .*_LISTEN'"),
        ({}, {"tokenfile": "x"}, "'tokenfile' in arguments; did you mean 'token_file'"),
        ({}, {"clients": "many"}, "clients='many' from arguments does not fit"),
        ({}, {"token_file": 5}, "token_file=5 from arguments does not fit"),
        ({}, {"grace": "soon"}, "grace='soon' from arguments does not fit"),
    ],
)
def test_an_unknown_or_unfit_setting_of_a_server_is_named(env, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_server(env=env, overrides=overrides)


def test_serve_in_a_file_is_a_table(tmp_path):
    file = tmp_path / "lmtier.toml"
    file.write_text("serve = 6380\n")
    for each in (load, load_server):
        with pytest.raises(ConfigError, match=r"\[serve\] must be a table"):
            each(file, {})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "", "http": ""}, "no address to listen on"),
        ({"listen": "6380"}, "serve: listen='6380' is not an address"),
        ({"http": "a:b"}, "serve: http='a:b' is not an address"),
        ({"clients": 0}, "clients=0: must be more than 0"),
        ({"patience": 0}, "patience=0.0: must be more than 0"),
        ({"grace": 0}, "grace=0.0: must be more than 0"),
        ({"tls_cert": "a"}, "TLS needs tls_cert and tls_key"),
        ({"tls_key": "a"}, "TLS needs tls_cert and tls_key"),
        ({"tls_ca": "a"}, "TLS needs tls_cert and tls_key"),
    ],
)
def test_a_server_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:6380", "127.0.0.1", 6380),
        ("localhost:0", "localhost", 0),
        (":9470", "", 9470),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_addresses_read_as_people_write_them(text, host, port):
    assert host_and_port(text, "listen") == (host, port)


@pytest.mark.parametrize("text", ["", "a", "a:", "::1:80", "a:65536", "a:-1", "a:1:2", "[g]:1", "http://a:1"])
def test_what_is_no_address_says_how_to_write_one(text):
    with pytest.raises(ConfigError, match=r"listen=.* write it like 127\.0\.0\.1:6380"):
        host_and_port(text, "listen")


def test_urls_are_parsed_once(monkeypatch):
    parsed = []
    parse = TierSpec.parse

    def counted(url):
        parsed.append(url)
        return parse(url)

    monkeypatch.setattr(TierSpec, "parse", counted)
    config = Config(tiers=["cpu://?capacity=12345678", "null://once"])
    for _ in range(10):
        assert len(config.cache_tiers) == len(config.all_tiers) == 2
        assert config.gpu is None
        assert config.approximation == ""
    assert parsed == list(config.tiers)
