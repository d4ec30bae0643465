"""The log of a server on stderr: lines of text or of JSON, on a thread, with repeats left out.

A message that repeats is written a few times a minute, whatever its arguments are. The next one says how many
were left out. Lines of the audit, and all lines at the level debug, are always written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from queue import Full, Queue

from lmtier.errors import audit, log
from lmtier.threads import start_thread

_LINES = 1000  # lines that may wait
_LAST_LINES = 1.0  # seconds for them in the end
_OFTEN, _WINDOW = 10, 60.0  # so many lines of one message in so many seconds


def write_log(level: str, form: str) -> BackgroundLogHandler:
    """Start the log of this process. `close` ends it."""
    lines = BackgroundLogHandler(
        _Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[lines], force=True)
    log.setLevel(level.upper())
    audit.setLevel(logging.INFO)
    return lines


class BackgroundLogHandler(logging.Handler):
    """Writes lines to stderr on a thread, so that a slow reader delays nothing."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._seen: dict[str, tuple[float, int]] = {}
        """Maps a message to the end of its present window, and how often it came within it."""
        self._lines: Queue[str | None] = Queue(_LINES)
        self._thread = start_thread("lmtier-log", self._write)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != audit.name and not log.isEnabledFor(logging.DEBUG):
            window_end, count = self._seen.get(str(record.msg), (0.0, 0))
            suppressed = 0
            if time.monotonic() > window_end:
                suppressed, count, window_end = max(0, count - _OFTEN), 0, time.monotonic() + _WINDOW
            self._seen[str(record.msg)] = window_end, count + 1
            if count >= _OFTEN:
                return
            if suppressed:
                record.msg = f"{record.msg} ({suppressed} more lines like this one were left out)"
        with suppress(Full):
            self._lines.put_nowait(self.format(record))

    def flush(self) -> None:
        """Wait until the lines so far are written, but not for ever."""
        until = time.monotonic() + _LAST_LINES
        while self._thread.is_alive() and self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(_LAST_LINES)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):  # not print: its lock, held for ever, would end the process with an abort
                os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))
            self._lines.task_done()


class _Text(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """With the offset of the time zone: 2026-11-24T08:15:05.123+0100."""
        local = time.localtime(record.created)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{record.msecs:03.0f}{time.strftime('%z', local)}"


class _Json(_Text):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage().removeprefix("lmtier: "),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)
