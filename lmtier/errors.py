"""The exceptions, the log, and what both leave out. Only misuse and failed starts raise; a miss is a value.

LMTierError
├── ConfigError     a setting is unknown, of the wrong type, or impossible
├── LayoutError     tensors, token counts or block ids do not fit the declared layout
├── TierError       a tier cannot be opened (unwritable, unreachable at start)
│   └── InUseError  another process has the directory or the address, and may end
├── CanaryError     save followed by load did not return the engine's own bytes
├── DeviceError     a call of the GPU's driver has failed
└── MisuseError     a call that the contract forbids (commit twice, use after close)
"""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

log = logging.getLogger("lmtier")
"""The log of lmtier. The adapters for vLLM and SGLang use loggers below those of the engine."""
audit = logging.getLogger("lmtier.audit")
"""Who deleted, pinned or changed what. A server writes these lines at every level of its log."""
_SHOWN = 80  # letters of a wrong value in an error
_SECRET = re.compile(r"pass|secret|token|auth|cred|key(?!file)", re.IGNORECASE)


class LMTierError(Exception):
    """The base of all exceptions that lmtier raises on purpose."""


class ConfigError(LMTierError):
    """A setting is unknown, of the wrong type, or impossible. The message names the key and its source."""


class LayoutError(LMTierError):
    """Tensors, token counts or block ids do not fit the declared layout."""


class TierError(LMTierError):
    """A tier cannot be opened. At run time a tier never raises: its failures are misses."""


class InUseError(TierError):
    """Another process has the directory or the address. It may end, so it is worth to try again later."""


class CanaryError(LMTierError):
    """Save followed by load did not return the engine's own bytes, so nothing may be served."""


class MisuseError(LMTierError):
    """The caller broke the contract of a call."""


class DeviceError(LMTierError):
    """A call of the GPU's driver has failed, or an earlier asynchronous call, which is reported only now."""


def excerpt(value: object) -> str:
    """A value as an error shows it: on one line, and not at length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python writes; tables in tables
        return "…"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def size_text(nbytes: float) -> str:
    """In the largest unit that leaves a number of at least 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def without_secrets(url: str) -> str:
    """A tier's URL for people: the user, the password, and options with such names become ***.

    Also if it cannot be read, because a password in it should have been quoted.
    """
    scheme = re.match(r"(?:[\w+.-]*://)?", url)
    assert scheme is not None
    rest = url[scheme.end() :]
    location, _, query = rest.partition("?")
    has_cut_login = "@" in query and (
        re.search(r"^:|:(?!\d)", location) or any("@" in each.partition("=")[0] for each in query.split("&"))
    )
    login = rest if has_cut_login else location
    if "@" in login and not rest.startswith("/"):  # a path contains no user
        rest = f"***{rest[login.rindex('@') :]}"
    return scheme[0] + "&".join(map(_without_secret, rest.split("&")))


def _without_secret(option: str) -> str:
    """The value may be a URL, with a login and with options."""
    for found in re.finditer(r"([^/?=]*)=", option):
        if _SECRET.search(unquote(found[1])):
            return f"{option[: found.end()]}***"
    return re.sub(r"(?<=://).*@", "***@", option)
