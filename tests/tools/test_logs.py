"""The log of a server: lines with a time zone, JSON, and no flood of repeats."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator

import pytest

from lmtier.errors import audit, log
from lmtier.tools.logs import write_log


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], log.level
    yield
    root.handlers[:] = handlers
    log.setLevel(level)
    audit.setLevel(logging.NOTSET)


def test_a_line_has_its_time_zone(capfd):
    """In JSON, a line is an object."""
    for form in ("text", "json"):
        lines = write_log("info", form)
        log.info("lmtier: tier %s is warm", "disk")
        lines.close()
    text, line = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} INFO lmtier: tier disk is warm", text
    )
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("info", "tier disk is warm")
    assert re.search(r"[+-]\d{4}$", found["time"])


def test_the_level_never_leaves_out_the_audit(capfd):
    lines = write_log("warning", "json")
    log.info("lmtier: news")
    audit.info("lmtier: FLUSHALL", extra={"facts": {"who": "an administrator"}})
    lines.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["who"] == "an administrator"


def test_repeated_lines_are_written_a_few_times_and_counted(capfd, monkeypatch):
    lines = write_log("info", "text")
    for number in range(100):
        log.warning("lmtier: %d was refused", number)
        audit.info("lmtier: pinned %d", number)
    now = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log.warning("lmtier: %d was refused", 100)
    lines.close()
    written = capfd.readouterr().err.splitlines()
    refused = [line for line in written if "refused" in line]
    assert len(refused) == 11
    assert refused[-1].endswith("lmtier: 100 was refused (90 more lines like this one were left out)")
    assert len(written) == 111, "the audit is whole"
