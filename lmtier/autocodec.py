"""codec=auto: which exact codec makes a tier's round trip shortest, from what is measured on its own objects.

What an object costs is the time it takes one thread: encode, write, read, decode. Writing and reading go
by the bytes as stored, at the rate of the tier's last transfers; a codec's part is tried now and then on
a piece of what is being stored. The first objects are stored as they are, while this is learnt. A codec
that would save less than a twentieth of the present cost is not worth a change, so the choice does not swing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmtier.codec import Header, Scratch, worth
from lmtier.compression import CODECS, RAW, Codec, NotDecodable, find
from lmtier.keys import is_value
from lmtier.layout import PAGE

log = logging.getLogger("lmtier")

PIECE = 1 << 20
"""Bytes of an object that are tried."""
EVERY = 32
"""Objects between two trials, after each codec had its first."""
_GAIN = 0.95
_WEIGHT = 1 / 8


@dataclass(slots=True)
class _Average:
    """A moving average; None until there was one value."""

    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) * _WEIGHT


@dataclass(slots=True)
class _Trials:
    """What a codec does to a byte: seconds to encode and decode it, and how much is left of it."""

    encode: _Average = field(default_factory=_Average)
    decode: _Average = field(default_factory=_Average)
    left: _Average = field(default_factory=_Average)


class Auto:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._codecs = {name: find(name) for name, codec in CODECS.items() if codec.is_exact}
        self._clock = clock
        self._lock = threading.Lock()
        self._write, self._read = _Average(), _Average()
        self._trials = {RAW: _Trials(_Average(0.0), _Average(0.0), _Average(1.0))}
        self._stores = self._trial = 0
        self.name = RAW
        """The codec in use."""

    def pick(self, header: Header, payload: memoryview, scratch: Scratch) -> Codec | None:
        """The codec for the next object, which is also looked at; None: none."""
        if is_value(header.name.key):
            return None
        with self._lock:
            number = -1
            if self._trial < len(self._codecs) or self._stores % EVERY == 0:
                number, self._trial = self._trial, self._trial + 1
            self._stores += 1
        if number >= 0:
            codec = list(self._codecs.values())[number % len(self._codecs)]
            self._try(codec, header, payload, scratch, number)
        return self._codecs.get(self.name)

    def wrote(self, nbytes: int, seconds: float) -> None:
        self._moved(self._write, nbytes, seconds)

    def read(self, nbytes: int, seconds: float) -> None:
        self._moved(self._read, nbytes, seconds)

    def _moved(self, average: _Average, nbytes: int, seconds: float) -> None:
        with self._lock:
            average.add(seconds / nbytes)

    def _try(self, codec: Codec, header: Header, payload: memoryview, scratch: Scratch, number: int) -> None:
        """Encode and decode a piece of the object, each time another one."""
        size = min(PIECE, header.nbytes)
        at = number * PIECE % max(1, header.nbytes - size + 1) // PAGE * PAGE
        piece = payload[at : at + size]
        if not (room := worth(size)):
            return  # too small for any codec
        memory = scratch.take(2 * PIECE)
        layout, shard = header.layout, header.name.shard
        began = self._clock()
        got = codec.encode(piece, memory[:room], layout, shard)
        between = self._clock()
        if got:
            try:
                codec.decode(memory[:got], memory[PIECE : PIECE + size], layout, shard)
            except NotDecodable as error:  # it cannot read what it has written: never
                log.error("lmtier: %s failed on its own bytes: %s", codec.name, error)
                return
        ended = self._clock()
        with self._lock:
            trials = self._trials.setdefault(codec.name, _Trials())
            trials.encode.add((between - began) / size)
            trials.decode.add((ended - between) / size if got else 0.0)
            trials.left.add(got / size if got else 1.0)
            self._choose()

    def _choose(self) -> None:
        if self._write.value is None:
            return
        costs = {name: self._cost(trials) for name, trials in self._trials.items()}
        best = min(costs, key=costs.__getitem__)
        if costs[best] < costs[self.name] * _GAIN:
            log.info("lmtier: codec=auto: %s after %s, %s", best, self.name, self._reasons(costs))
            self.name = best

    def _cost(self, trials: _Trials) -> float:
        """Seconds that a byte takes to the tier and back. What was never read is as fast as writing."""
        write = self._write.value or 0.0
        read = write if self._read.value is None else self._read.value
        encode, decode, left = (each.value or 0.0 for each in (trials.encode, trials.decode, trials.left))
        return encode + decode + left * (write + read)

    @staticmethod
    def _reasons(costs: dict[str, float]) -> str:
        return ", ".join(f"{name} {seconds * 1e9:.1f} s/GB" for name, seconds in costs.items())
