"""Tables and progress on a terminal. The only module that prints."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType


def say(text: str = "") -> None:
    print(text, flush=True)


def complain(text: str) -> None:
    print(f"lmtier: {text}", file=sys.stderr, flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their headers; a column of numbers is aligned to the right."""
    lines = [[str(cell) for cell in row] for row in rows]
    numeric = [bool(lines) and all(_is_number(line[i]) for line in lines) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, numeric, strict=True)
        return "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip()

    return "\n".join([aligned(headers), "  ".join("-" * width for width in widths), *map(aligned, lines)])


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def size(nbytes: int) -> str:
    """In the largest unit that leaves a number of at least 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _is_number(text: str) -> bool:
    bare = text.strip("≥≤×% ").replace(",", "")
    return not bare or bare == "-" or bare.replace(".", "", 1).isdigit()


class Progress:
    """A bar on stderr while the block runs, if stderr is a terminal; otherwise silent."""

    WIDTH = 24

    def __init__(self, total: int = 1) -> None:
        self._total = total
        self._done = 0
        self._line = ""
        self._shown = sys.stderr.isatty()

    def step(self, what: str = "") -> None:
        self.at(self._done + 1, self._total, what)

    def at(self, done: int, total: int, what: str = "") -> None:
        self._done, self._total = min(done, total), max(1, total)
        self._line = f"{100 * self._done // self._total:3d} %  {what}"
        self._draw()

    def say(self, text: str) -> None:
        """A line of output above the bar."""
        self._clear()
        say(text)
        self._draw()

    def _draw(self) -> None:
        if self._shown:
            full = self.WIDTH * self._done // self._total
            bar = "█" * full + "░" * (self.WIDTH - full)
            room = shutil.get_terminal_size().columns - self.WIDTH - 2
            print(f"\r{bar} {self._line[:room]}\x1b[K", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()
