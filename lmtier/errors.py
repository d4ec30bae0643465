"""The exception tree. Only misuse and start-up raise; a miss is a value.

LMTierError
├── ConfigError     a setting is unknown, of the wrong type, or impossible
├── LayoutError     tensors, token counts or block ids do not fit the declared layout
├── TierError       a tier cannot be opened (locked, unwritable, unreachable at start)
├── CanaryError     save followed by load did not give the engine its own bytes back
├── DeviceError     a call of the GPU's driver has failed
└── MisuseError     a call that the contract forbids (commit twice, use after close)
"""

from __future__ import annotations


class LMTierError(Exception):
    """Everything lmtier raises on purpose."""


class ConfigError(LMTierError):
    """A setting is unknown, of the wrong type, or impossible. Names the key and where it stood."""


class LayoutError(LMTierError):
    """Tensors, token counts or block ids do not fit the declared layout."""


class TierError(LMTierError):
    """A tier cannot be opened. At run time a tier never raises: its failures are misses."""


class CanaryError(LMTierError):
    """Save followed by load did not return the engine's own bytes: nothing may be served."""


class MisuseError(LMTierError):
    """The caller broke the contract of a call."""


class DeviceError(LMTierError):
    """A call of the GPU's driver has failed: it, or one before it that went on after it had returned."""
