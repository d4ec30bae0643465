"""Runs the blocks of a page as one script, and compares what each prints with what stands below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FILE = re.compile(r"<!-- file (\S+) -->\n```python\n(.*?)```\n", re.DOTALL)
_BLOCK = re.compile(r"<!-- (run[^>]*) -->\n```sh\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def blocks(page: Path, mark: str = "run") -> list[tuple[str, str]]:
    """What is marked so: commands, and what they print."""
    return [(script, shown) for found, script, shown in _BLOCK.findall(page.read_text()) if found == mark]


def files(page: Path) -> dict[str, str]:
    """The programs of a page, by the names under which its commands run them."""
    return dict(_FILE.findall(page.read_text()))


def _pattern(line: str) -> str:
    """A line of a page: `…` stands for any text within it."""
    return r"[^\n]*".join(re.escape(part) for part in line.split("…"))


def check(
    parts: Sequence[tuple[str, str]],
    home: Path,
    variables: Mapping[str, str],
    ports: Mapping[str, str],
    patience: float,
) -> list[str]:
    """What each part printed. `ports` are those of the page, and what to take in their place."""
    script = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    script += "".join(f"{part}\necho; echo '---- {at}'\n" for at, (part, _) in enumerate(parts))
    script += "test -z \"$(jobs -pr)\" || { echo 'the page leaves running what it started' >&2; exit 1; }\n"
    for port, free in ports.items():
        script = script.replace(port, free)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **variables,
        "HOME": str(home),
    }
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=patience, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rest, each = done.stdout, []
    for at, (_, wanted) in enumerate(parts):
        printed, _, rest = rest.partition(f"---- {at}\n")
        each.append(printed)
        shown = re.compile(r".*?".join(rf"^{_pattern(line)}$" for line in wanted.splitlines()), re.M | re.S)
        assert shown.search(printed), f"wanted:\n{wanted}\nprinted:\n{printed}"
    return each
