"""The boards against the types of Grafana, of the release that pyproject.toml names: it knows every field."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

BOARDS = sorted((Path(__file__).parents[2] / "dashboards" / "grafana").glob("*.json"))
register_default_plugins()  # the options of each kind of panel, and the queries of Prometheus


def lost(ours: Any, theirs: Any, at: str = "board") -> Iterator[str]:
    """What Grafana's types do not give back as it was: a field with a name that they do not know."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from lost(value, theirs.get(name), f"{at}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{at}[{i}]")
    elif ours != theirs:
        yield f"{at}: {ours!r}"


def wrong(value: Any, kind: Any, at: str = "board") -> Iterator[str]:
    """Values that are not of the types that Grafana declares: they are read without a check."""
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin in (Union, types.UnionType):
            tried = [list(wrong(value, each, at)) for each in arguments]
            if all(tried):
                yield from max(tried, key=lambda each: len(each[0]))  # the one that came furthest
        case origin if origin is Literal:
            if value not in arguments:
                yield f"{at}: {value!r}"
        case origin if origin is list and isinstance(value, list):
            for i, each in enumerate(value):
                yield from wrong(each, arguments[0], f"{at}[{i}]")
        case origin if origin is dict and isinstance(value, dict):
            for name, each in value.items():
                yield from wrong(each, arguments[1], f"{at}.{name}")
        case None if isinstance(kind, type) and issubclass(kind, Enum):
            if value not in [each.value for each in kind]:
                yield f"{at}: {value!r}"
        case None if kind is Any or isinstance(value, (int, float) if kind is float else kind):
            if type(value).__module__.startswith("grafana_foundation_sdk"):
                for name, hint in get_type_hints(type(value)).items():
                    yield from wrong(getattr(value, name), hint, f"{at}.{name}")
        case _:
            yield f"{at}: {value!r}"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field_of_a_board(path):
    board = json.loads(path.read_text())
    assert list(lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board))))) == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_value_of_a_board_has_grafanas_type(path):
    assert list(wrong(Dashboard.from_json(json.loads(path.read_text())), Dashboard)) == []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("fieldConfig", "defaults", "custom", "stacking", "mode"), "stacked"),
        (("options", "legend", "placement"), "left"),
        (("options", "legend", "showLegends"), True),
        (("targets", 0, "legend"), "{{tier}}"),
        (("gridPos", "w"), "12"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_a_field_that_grafana_does_not_understand_is_found(where, value):
    board = json.loads(next(path for path in BOARDS if path.stem == "tiers").read_text())
    place = board["panels"][1]
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    read = Dashboard.from_json(board)
    assert [*lost(board, json.loads(JSONEncoder().encode(read))), *wrong(read, Dashboard)] != []
