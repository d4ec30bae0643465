"""The exceptions, and the log. Only misuse and failures at start raise; a miss is a value.

LMTierError
├── ConfigError     a setting is unknown, of the wrong type, or impossible
├── LayoutError     tensors, token counts or block ids do not fit the declared layout
├── TierError       a tier cannot be opened (locked, unwritable, unreachable at start)
├── CanaryError     save followed by load did not return the engine's own bytes
├── DeviceError     a call of the GPU's driver has failed
└── MisuseError     a call that the contract forbids (commit twice, use after close)
"""

from __future__ import annotations

import logging

log = logging.getLogger("lmtier")
"""The log of lmtier. The adapters for vLLM and SGLang use loggers below those of the engine."""
audit = logging.getLogger("lmtier.audit")
"""Who deleted, pinned or changed what. A server writes these lines at every level of its log."""


class LMTierError(Exception):
    """The base of all exceptions that lmtier raises on purpose."""


class ConfigError(LMTierError):
    """A setting is unknown, of the wrong type, or impossible. The message names the key and its source."""


class LayoutError(LMTierError):
    """Tensors, token counts or block ids do not fit the declared layout."""


class TierError(LMTierError):
    """A tier cannot be opened. At run time a tier never raises: its failures are misses."""


class CanaryError(LMTierError):
    """Save followed by load did not return the engine's own bytes, so nothing may be served."""


class MisuseError(LMTierError):
    """The caller broke the contract of a call."""


class DeviceError(LMTierError):
    """A call of the GPU's driver has failed, or an earlier asynchronous call, which is reported only now."""
