"""Tiered KV-cache offload for LLM serving."""

__version__ = "0.1.0"

from lmtier.cache import Cache
from lmtier.config import Config
from lmtier.keys import Extra, Identity, KeyChain, weights_digest
from lmtier.layout import LayerShape, Layout, Shard
from lmtier.mover import Mover
from lmtier.paging import PagedKV

__all__ = [
    "Cache",
    "Config",
    "Extra",
    "Identity",
    "KeyChain",
    "LayerShape",
    "Layout",
    "Mover",
    "PagedKV",
    "Shard",
    "weights_digest",
]
