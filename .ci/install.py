"""`pip install` with a line that says how far it is, instead of hundreds or none; all of them if it fails."""

from __future__ import annotations

import re
import subprocess
import sys
import time

_FILE = re.compile(r"\s*Downloading (?:\S*/)?(\S+) \(([\d.]+) (bytes|kB|MB|GB)\)")
_MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_LARGE = 50.0  # MB: one of these has a line of its own in a log
_EACH = 10.0  # seconds between the others


def main(arguments: list[str]) -> int:
    options = ("--disable-pip-version-check", "install", "--no-compile", "--progress-bar", "off")
    said, files, megabytes, next_line = list[str](), 0, 0.0, time.monotonic() + _EACH
    is_terminal = sys.stderr.isatty()
    command = (sys.executable, "-m", "pip", *options, *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            said.append(line)
            size = 0.0
            if line.startswith("Installing collected packages"):
                step = "unpacking them"
            elif (found := _FILE.match(line)) and not found[1].endswith(".metadata"):
                size = float(found[2]) * _MEGABYTES[found[3]]
                step = f"{found[1]} ({size:.0f} MB)"
            else:
                continue
            progress = f"  {files} files, {megabytes:.0f} MB came; now {step}"
            files, megabytes = files + bool(size), megabytes + size
            if is_terminal:
                print(f"\r{progress[:78]}\x1b[K", end="", file=sys.stderr, flush=True)
            elif size >= _LARGE or time.monotonic() >= next_line:
                next_line = time.monotonic() + _EACH
                print(progress, file=sys.stderr, flush=True)
    if is_terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if pip.returncode:
        print("".join(said), end="", file=sys.stderr)
    elif files:
        print(f"  downloaded {megabytes:.0f} MB in {files} file{'s' * (files != 1)}", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
