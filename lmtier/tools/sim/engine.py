"""The memory of a simulated engine's GPU: its own prefix cache, and a gpu:// tier's copies of chunks.

The engine keeps the chunks that it computed or loaded until others need their room, the least recently used
first. `GpuCopies` decides about the copies, as it does in a real engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lmtier.copy.gpu_copies import GpuCopies
from lmtier.core.match import Lookup
from lmtier.format.layout import ChunkForm

ENGINE, GPU = "engine", "gpu"
"""The sources of tokens that need no transfer over the bus."""


class EngineMemory:
    """`own`: the chunks that its prefix cache holds. `resets_every`: seconds until it is emptied; 0: never.

    `copies`: the gpu:// tier, if there is one.
    """

    def __init__(self, own: int, resets_every: float, copies: GpuCopies | None) -> None:
        self._room, self._resets_every, self._copies = own, resets_every, copies
        self._own: OrderedDict[bytes, None] = OrderedDict()
        self._due = resets_every

    def has(self, keys: Sequence[bytes], now: float) -> int:
        """The number of leading chunks in its own prefix cache."""
        if self._resets_every and now >= self._due:
            self._own.clear()
            self._due = now - now % self._resets_every + self._resets_every
        return next((index for index, key in enumerate(keys) if key not in self._own), len(keys))

    def load(self, match: Lookup, own: int, form: ChunkForm) -> list[str]:
        """Where each chunk of a match comes from, if the engine has the first `own` itself."""
        sources = [ENGINE] * own + match.sources[own:]
        if self._copies is not None and own < len(match.run):
            gpu_places = self._copies.load(match.grant.placement, form, own)
            for index, place in enumerate(gpu_places.by_chunk, start=own):
                if place is not None and place.is_filled:
                    sources[index] = GPU
            self._copies.release(gpu_places)
        return sources

    def keep(self, keys: Sequence[bytes]) -> None:
        """The engine has computed or loaded all of these. The tail of a prompt leaves before its head."""
        for key in reversed(keys):
            self._own[key] = None
            self._own.move_to_end(key)
        while len(self._own) > self._room:
            self._own.popitem(last=False)
