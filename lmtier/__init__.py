"""Tiered KV-cache offload for LLM serving. Each name is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

from lmtier._version import __version__

if TYPE_CHECKING:
    from lmtier.client.client import Client
    from lmtier.config import Config
    from lmtier.copy.mover import Mover
    from lmtier.copy.paging import PagedKV
    from lmtier.core.cache import Cache
    from lmtier.core.grant import Grant, Match
    from lmtier.errors import ConfigError, LayoutError, LMTierError, MisuseError, TierError
    from lmtier.format.keys import Extra, Identity, KeyChain, weights_digest
    from lmtier.format.layout import LayerShape, Layout, Name, Shard
    from lmtier.observe.prompts import Origin
    from lmtier.tiers.base import Item, Stat
    from lmtier.tiers.blocking import BlockingTier

__all__ = [
    "BlockingTier",
    "Cache",
    "Client",
    "Config",
    "ConfigError",
    "Extra",
    "Grant",
    "Identity",
    "Item",
    "KeyChain",
    "LMTierError",
    "LayerShape",
    "Layout",
    "LayoutError",
    "Match",
    "MisuseError",
    "Mover",
    "Name",
    "Origin",
    "PagedKV",
    "Shard",
    "Stat",
    "TierError",
    "__version__",
    "weights_digest",
]

_WHERE = {
    "client.client": ("Client",),
    "config": ("Config",),
    "copy.mover": ("Mover",),
    "copy.paging": ("PagedKV",),
    "core.cache": ("Cache",),
    "core.grant": ("Grant", "Match"),
    "errors": ("ConfigError", "LMTierError", "LayoutError", "MisuseError", "TierError"),
    "format.keys": ("Extra", "Identity", "KeyChain", "weights_digest"),
    "format.layout": ("LayerShape", "Layout", "Name", "Shard"),
    "observe.prompts": ("Origin",),
    "tiers.base": ("Item", "Stat"),
    "tiers.blocking": ("BlockingTier",),
}
_MODULE = {name: f"lmtier.{module}" for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        raise AttributeError(f"module 'lmtier' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return value
