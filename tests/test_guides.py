"""Every block of a page that is marked with `<!-- run -->` runs, and prints what stands below it."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from lmtier.config import Config
from lmtier.format import keys, objects
from lmtier.format.layout import DTYPE_BYTES, KNOWN_PACKINGS
from lmtier.observe.metrics import MISS_REASONS
from lmtier.tools.cli import make_parser
from lmtier.wire import verbs
from tests.guides import blocks, check, files
from tests.redis_process import free_port

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
QUOTED = re.compile(r"<!-- from (\S+) -->\n```python\n(.*?)```\n", re.DOTALL)
GUIDES = {path.stem: found for path in sorted(DOCS.glob("*.md")) if (found := blocks(path))}


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_and_prints_what_it_says(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, program in files(DOCS / f"{page}.md").items():
        (tmp_path / name).write_text(program)
    redis, http, other = (free_port() for _ in range(3))
    defaults = {"LMTIER_SERVE_LISTEN": f"127.0.0.1:{redis}", "LMTIER_SERVE_HTTP": f"127.0.0.1:{http}"}
    ports = {"6379": str(other), "6380": str(redis), "9470": str(http)}
    check(GUIDES[page], tmp_path, defaults, ports, patience=120)


def test_quoted_code_is_that_of_the_file():
    quotes = [each for path in DOCS.glob("*.md") for each in QUOTED.findall(path.read_text())]
    assert {file for file, _ in quotes} >= {"examples/my_tier.py", "examples/library.py"}
    for file, code in quotes:
        assert code in (ROOT / file).read_text(), file


def test_the_guide_to_misses_names_every_reason():
    named = re.findall(r"`(\w+)`", (DOCS / "HIT_RATE.md").read_text())
    assert set(MISS_REASONS) <= set(named)


def test_every_alert_has_a_runbook_that_says_what_to_do():
    page = (DOCS / "ALERTS.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    (group,) = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alerts.yml").read_text())["groups"]
    links = {each["alert"]: each["annotations"].get("runbook_url") for each in group["rules"]}
    assert links == {name: f"docs/ALERTS.md#{name.lower()}" for name in sections}
    for name, text in sections.items():
        heads = re.findall(r"^\*\*([\w ]+):\*\* \S", text, re.MULTILINE)
        assert heads == ["You see", "It means", "Do"], name
        assert "```sh\n" in text.partition("**Do:**")[2], name


def test_the_commands_of_the_runbooks_are_understood():
    page = (DOCS / "ALERTS.md").read_text()
    typed = [
        shlex.split(part, comments=True)
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        for part in re.split(r"&&|\|", line)
    ]
    ours = [words[1:] for words in typed if words and words[0] == "lmtier"]
    assert {"ping", "stats", "explain", "clear", "set", "verify", "top"} == {words[0] for words in ours}
    for words in ours:
        make_parser().parse_args(words)


def test_the_stability_page_has_the_versions_of_all_formats():
    rows = dict(
        re.findall(r"^\| ([\w ]+) \| `?([\w-]+)`? \| ", (DOCS / "STABILITY.md").read_text(), re.MULTILINE)
    )
    now = {
        **{"objects": objects.VERSION, "sealed objects": objects.SEALED_VERSION},
        **{"keys": keys.FORMAT.decode(), "protocol": verbs.PROTOCOL},
    }
    assert {name: rows[name] for name in now} == {name: str(version) for name, version in now.items()}


def test_the_api_page_names_settings_packings_and_dtypes():
    page = (DOCS / "API.md").read_text()
    words = {*(each.name for each in fields(Config)), *KNOWN_PACKINGS, *DTYPE_BYTES}
    assert {word for word in words if not re.search(rf'`"?{word}"?`', page)} == set()


def test_every_guide_runs_something():
    guides = {
        "API",
        "ONE_SERVER",
        "HOSTS",
        "HIT_RATE",
        "SIZE_A_CACHE",
        "WRITE_A_TIER",
        "WRITE_AN_ADAPTER",
        "OPERATE",
    }
    assert guides <= set(GUIDES)
