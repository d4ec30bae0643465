"""The exit codes of `lmtier`: all of them, and what each means."""

from __future__ import annotations

import os
import signal
from enum import IntEnum


class Exit(IntEnum):
    """How a command ends."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "it did what was asked, and found nothing wrong"
    NO = 1, "something is wrong, missing or not ready, or no lmtier server answers"
    MISUSE = (
        2,
        "the command, a file, a setting or an engine's URL cannot work, or the server refuses this user",
    )
    UNPROVEN = 3, "`lmtier prove` found nothing wrong, and too little to prove that all is right"
    TRY_AGAIN = os.EX_TEMPFAIL, "another process has the directory or the address, and may end"
    INTERRUPTED = (
        128 + signal.SIGINT,
        "Ctrl-C; what goes on until then, `lmtier serve` or `top`, ends with 0",
    )
    NO_READER = 128 + signal.SIGPIPE, "the reader of the output has gone, as `head` does"
    ENDED = 128 + signal.SIGTERM, "SIGTERM; `lmtier serve` finishes then, and ends with 0"
