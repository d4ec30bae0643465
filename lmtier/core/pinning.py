"""Named pins in the slab and in owned tiers: chunks that are not evicted, for up to half of each place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lmtier.core.index import Index
from lmtier.core.match import CPU, State
from lmtier.errors import MisuseError
from lmtier.rules.lifetimes import FOREVER, Pinned, Pins


class NamedPins:
    def __init__(self, places: Mapping[str, Index], clock: Callable[[], float]) -> None:
        """`places`: the indexes of the slab and of owned tiers, by label."""
        self.pins = Pins()
        self._places = places
        self._clock = clock
        for index in places.values():
            index.wanted = self.pins.wanted

    def pin(self, name: str, keys: Sequence[bytes], seconds: float) -> dict[str, int]:
        """Protect `keys` from eviction in every place that has or gets them. Replaces a pin of this name."""
        end = self._clock() + seconds
        if len(set(keys)) != len(keys) or any(map(self._places[CPU].is_record, keys)):
            raise MisuseError("a pin takes keys of KV, each of them once")
        self.pins.need_room(name, len(keys))
        for label, index in self._places.items():
            new = {entry for key in keys if (entry := index.get(key)) is not None} - index.pinned
            more = sum(entry.nbytes for entry in new)
            if index.pinned_bytes + more > index.capacity // 2:
                raise MisuseError(
                    f"{label} gives pins half of its {index.capacity} bytes: {index.pinned_bytes} are pinned,"
                    f" and this would be {more} more; unpin something, or pin fewer tokens"
                )
        self._let_go(self.pins.put(name, keys, end))
        for index in self._places.values():
            for key in keys:
                if (entry := index.get(key)) is not None and entry.state is State.READY:
                    index.pin(entry)
        return self._held(keys)

    def unpin(self, name: str) -> bool:
        """Returns whether such a pin existed."""
        is_there = name in self.pins
        self._let_go(self.pins.take(name))
        return is_there

    def expire(self) -> None:
        """Remove the pins that have expired."""
        if self.pins:
            for name in self.pins.over(self._clock()):
                self.unpin(name)

    def pinned(self) -> list[Pinned]:
        now = self._clock()
        left = {pin.name: None if pin.end == FOREVER else pin.end - now for pin in self.pins}
        return [Pinned(pin.name, len(pin.keys), self._held(pin.keys), left[pin.name]) for pin in self.pins]

    def _let_go(self, keys: Sequence[bytes]) -> None:
        for index in self._places.values():
            for key in keys:
                if (entry := index.get(key)) is not None:
                    index.unpin(entry)

    def _held(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of them each place has pinned."""
        places = self._places.items()
        return {label: sum(index.get(key) in index.pinned for key in keys) for label, index in places}
