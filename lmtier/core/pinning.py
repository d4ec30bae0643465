"""Pins in the slab and in owned tiers: chunks that are not evicted, by name.

Those of people take up to half of each place. Those of hints last a day at most. They are made only while all
pins together take up to a quarter, and have names and limits of their own: so who sends hints leaves room for
people's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from lmtier.core.index import HINT_PINS_DIVISOR, PINS_DIVISOR, Index
from lmtier.core.match import CPU, EntryState
from lmtier.errors import MisuseError, size_text
from lmtier.rules.lifetimes import FOREVER, Pin, Pinned, Pins


class NamedPins:
    def __init__(self, indexes: Mapping[str, Index], clock: Callable[[], float]) -> None:
        """`indexes`: those of the slab and of owned tiers, by label."""
        self.pins = Pins()
        self.hinted = Pins()
        self._places = indexes
        self._clock = clock
        for index in indexes.values():
            index.keys_to_pin, index.keys_to_pin_by_hints = self.pins.wanted, self.hinted.wanted

    def __len__(self) -> int:
        return len(self.pins) + len(self.hinted)

    def __iter__(self) -> Iterator[Pin]:
        return chain(self.pins, self.hinted)

    def pin(
        self, name: str, keys: Sequence[bytes], seconds: float, *, hinted: bool = False
    ) -> dict[str, int]:
        """Protect `keys` from eviction in every place that has or gets them. Replaces a pin of this name."""
        pins, divisor = (self.hinted, HINT_PINS_DIVISOR) if hinted else (self.pins, PINS_DIVISOR)
        end = self._clock() + seconds
        if len(set(keys)) != len(keys) or any(map(self._places[CPU].is_record, keys)):
            raise MisuseError("a pin takes keys of KV, each of them once")
        pins.need_room(name, len(keys))
        for label, index in self._places.items():
            new_entries = {entry for key in keys if (entry := index.get(key)) is not None} - index.pinned
            new_bytes = sum(entry.nbytes for entry in new_entries)
            if index.pinned_bytes + new_bytes > index.capacity // divisor:
                share_text = "hints a quarter" if hinted else "pins half"
                raise MisuseError(
                    f"{label} gives {share_text} of its {size_text(index.capacity)}: "
                    f"{size_text(index.pinned_bytes)} are pinned, and this would be {size_text(new_bytes)} "
                    "more; unpin something, or pin fewer tokens"
                )
        self._let_go(pins.put(name, keys, end))
        for index in self._places.values():
            for key in keys:
                if (entry := index.get(key)) is not None and entry.state is EntryState.READY:
                    index.pin(entry)
        return self._held(keys)

    def unpin(self, name: str) -> bool:
        """Returns whether such a pin existed."""
        existed = name in self.pins or name in self.hinted
        self._let_go(self.pins.take(name))
        self.unpin_hinted(name)
        return existed

    def unpin_hinted(self, name: str) -> None:
        """End a pin that a hint made."""
        self._let_go(self.hinted.take(name))

    def expire(self) -> None:
        """Remove the pins that have expired."""
        now = self._clock()
        for name in self.pins.over(now):
            self._let_go(self.pins.take(name))
        for name in self.hinted.over(now):
            self.unpin_hinted(name)

    def pinned(self) -> list[Pinned]:
        now = self._clock()
        seconds_left = {pin.end: None if pin.end == FOREVER else pin.end - now for pin in self}
        return [Pinned(pin.name, len(pin.keys), self._held(pin.keys), seconds_left[pin.end]) for pin in self]

    def check(self) -> None:
        self.pins.check()
        self.hinted.check()
        for index in self._places.values():
            pinned = {entry.key for entry in index.pinned}
            assert pinned <= self.pins.wanted.keys() | self.hinted.wanted.keys(), "pinned, and no pin says so"

    def _let_go(self, keys: Sequence[bytes]) -> None:
        """No pin of one kind wants them any more. One of the other kind may, within its own bound."""
        for index in self._places.values():
            for key in keys:
                if (entry := index.get(key)) is not None and entry in index.pinned:
                    index.unpin(entry)
                    if index.is_wanted(key):
                        index.pin(entry)

    def _held(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of them each place has pinned."""
        places = self._places.items()
        return {label: sum(index.get(key) in index.pinned for key in keys) for label, index in places}
