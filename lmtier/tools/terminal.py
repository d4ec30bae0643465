"""Tables, progress and whole screens on a terminal. The only module that prints."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from lmtier.errors import size_text as size_text  # for who prints
from lmtier.observe.words import duration_text as duration_text
from lmtier.tools.exits import Exit

_LONG = 1000  # letters of an error


class ReaderGone(Exception):
    """The reader of our output, such as `head`, has enough."""


def say(text: str = "") -> None:
    """Print a text. Raises ReaderGone; after that nothing more is printed."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReaderGone from None


def complain(text: str) -> None:
    """One line, which is not long: what a user gave is quoted in it."""
    line = " ".join(text.splitlines())
    print(f"lmtier: {line if len(line) <= _LONG else f'{line[:_LONG]}…'}", file=sys.stderr, flush=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their headers; a column of numbers is aligned to the right."""
    lines = [[str(cell) for cell in row] for row in rows]
    is_numeric = [bool(lines) and all(_is_number(line[i]) for line in lines) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, is_numeric, strict=True)
        return "  ".join(c.rjust(w) if is_number else c.ljust(w) for c, w, is_number in cells).rstrip()

    return "\n".join([aligned(headers), "  ".join("-" * width for width in widths), *map(aligned, lines)])


def number_text(value: float) -> str:
    """Three significant digits, never an exponent."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def count_text(count: int, word: str) -> str:
    """1 chunk, 2 chunks."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def bar(share: float, width: int) -> str:
    full = min(width, max(0, round(share * width)))
    return "█" * full + "░" * (width - full)


def spark(levels: Iterable[float | None]) -> str:
    """A character for each level from 0 to 1; a point where there is none."""
    return "".join("·" if level is None else "▁▂▃▄▅▆▇█"[min(7, max(0, int(level * 8)))] for level in levels)


def printable(text: str) -> str:
    """Text from elsewhere, without characters that control this terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def show_again(text: str) -> None:
    """Print `text` in place of everything on the terminal. If stdout is no terminal, append it."""
    say(f"\x1b[H\x1b[2J\x1b[3J{text}" if sys.stdout.isatty() else f"{text}\n")


def _is_number(text: str) -> bool:
    bare = text.strip("≥≤×% ").replace(",", "")
    return not bare or bare == "-" or bare.replace(".", "", 1).isdigit()


class Interruption:
    """Ctrl-C, which ends a block of work and not the command: what is known by then is still shown."""

    status = Exit.INTERRUPTED

    def __init__(self) -> None:
        self.came = False


@contextmanager
def until_interrupted() -> Iterator[Interruption]:
    """The block runs until its end or until Ctrl-C."""
    interruption = Interruption()
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.came = True
        complain("interrupted: this is what was known by then")


class Progress:
    """How far the block is, on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

    WIDTH = 24
    EACH = 10.0

    def __init__(self, total: int = 1) -> None:
        self._total = total
        self._done = 0
        self._line = ""
        self._shown = sys.stderr.isatty()
        self._next_line = time.monotonic() + self.EACH

    def step(self, what: str = "") -> None:
        self.at(self._done + 1, self._total, what)

    def at(self, done: int, total: int, what: str = "") -> None:
        self._done, self._total = min(done, total), max(1, total)
        self._line = f"{100 * self._done // self._total:3d} %  {what}"
        self._draw()

    def say(self, text: str) -> None:
        """A line of output above the bar."""
        self.clear()
        say(text)
        self._draw()

    def _draw(self) -> None:
        if self._shown:
            done = bar(self._done / self._total, self.WIDTH)
            room = shutil.get_terminal_size().columns - self.WIDTH - 2
            print(f"\r{done} {self._line[:room]}\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self.EACH
            complain(self._line.strip())

    def clear(self) -> None:
        """Remove the bar until the next step, because a line follows."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class Screen:
    """The whole terminal while the block runs. It is always restored at the end of the block."""

    BEGIN = "\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
    END = "\x1b[?25h\x1b[?1049l"

    def __enter__(self) -> Screen:
        self._out = sys.stdout.fileno()
        self._in = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before = None if self._in is None else termios.tcgetattr(self._in)
        self._bell, bell = os.pipe()
        self._ringer = bell
        for fd in (self._bell, bell):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        self._handlers: dict[int, Any] = {
            number: signal.signal(number, handler)
            for number, handler in ((signal.SIGWINCH, _resized), (signal.SIGTERM, _ended))
        }
        try:
            if self._in is not None:
                tty.setcbreak(self._in)
                mode = termios.tcgetattr(self._in)
                mode[6][termios.VSUSP] = b"\0"  # a user who suspended it would be left with this screen
                termios.tcsetattr(self._in, termios.TCSANOW, mode)
            self._write(self.BEGIN)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._write(self.END)
        if self._in is not None and self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, self._before)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._bell)
        os.close(self._ringer)

    @property
    def size(self) -> tuple[int, int]:
        """The present columns and rows."""
        columns, rows = os.get_terminal_size(self._out)
        return columns or 80, rows or 24

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines and nothing else. Too many or too long lines would scroll: check `size` before."""
        self._write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")

    def show(self, lines: Callable[[int, int], Sequence[str]], seconds: float) -> bool:
        """Show `lines(columns, rows)` for so long, also when the size changes. False: the user typed q."""
        ends_at = time.monotonic() + seconds
        while (remaining := ends_at - time.monotonic()) > 0:
            self.draw(lines(*self.size))
            if self.key(remaining) in ("q", "Q"):
                return False
        return True

    def key(self, seconds: float) -> str:
        """The typed characters. Empty after `seconds`, or if the size of the terminal has changed."""
        ready, _, _ = select.select([self._bell] + ([] if self._in is None else [self._in]), [], [], seconds)
        if self._bell in ready:
            os.read(self._bell, 512)
        if self._in is None or self._in not in ready:
            return ""
        return os.read(self._in, 64).decode(errors="replace") or "q"  # the terminal is closed

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _resized(*_: object) -> None:
    """Wakes up a thread that waits for a key."""


def _ended(*_: object) -> NoReturn:
    raise SystemExit(Exit.ENDED)
