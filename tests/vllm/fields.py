"""Writes the tables of docs/KEYS.md from the list by which lmtier makes keys of vLLM's configuration.

python tests/vllm/fields.py
"""

from __future__ import annotations

import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = ROOT / "integrations/lmtier_integrations/vllm/fields.toml"
PAGE = ROOT / "docs/KEYS.md"
BEGIN, END = "<!-- fields -->\n", "<!-- /fields -->"
KEYS = {
    "yes": "**yes**",
    "known": "**yes**, otherwise",
    "media": "**yes**, of media",
    "layout": "by layout",
    "run": "this run only",
    "refused": "refused",
    "no": "no",
}


def entries() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(LIST.read_text())


def table() -> str:
    found = entries()
    lines = []
    for of, rows in groupby(
        sorted(found["fields"], key=lambda entry: entry["of"]), lambda entry: entry["of"]
    ):
        lines += [f"| **`{of}`** | | |"]
        lines += [f"| {_names(row['names'])} | {KEYS[row['key']]} | {row['why']} |" for row in rows]
    lines += ["| **environment** | | |"]
    lines += [f"| {_names(row['names'])} | {KEYS['yes']} | {row['why']} |" for row in found["environment"]]
    return "\n".join(["| field | in the key | why |", "|---|---|---|", *lines]) + "\n"


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def _names(names: str) -> str:
    return "all" if names == "*" else ", ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
