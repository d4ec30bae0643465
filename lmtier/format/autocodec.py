"""codec=auto: chooses the exact codec with the shortest round trip, measured on the tier's own objects.

The cost of an object is the time that one thread needs to encode, write, read and decode it. Writing and
reading are estimated from the stored bytes and the rate of the tier's last transfers. A codec is tried now
and then on a piece of an object that is being stored. The first objects are stored without a codec. The
codec changes only if that saves at least a twentieth of the present cost, so the choice does not swing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lmtier.errors import log
from lmtier.format.compression import CODECS, RAW, Codec, NotDecodable, find
from lmtier.format.keys import is_value
from lmtier.format.layout import PAGE
from lmtier.format.objects import Header, Scratch, max_encoded_bytes

PIECE = 1 << 20
"""The bytes of an object on which a codec is tried."""
EVERY = 32
"""Objects between two trials, once each codec has been tried."""
_GAIN = 0.95
_WEIGHT = 1 / 8


@dataclass(slots=True)
class _Average:
    """A moving average; None until it has a value."""

    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) * _WEIGHT


@dataclass(slots=True)
class _Trials:
    """The cost of a codec per byte: seconds to encode and decode it, and the bytes that remain."""

    encode: _Average = field(default_factory=_Average)
    decode: _Average = field(default_factory=_Average)
    left: _Average = field(default_factory=_Average)


class AutoCodec:
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
        """The codec for this object, which may also serve as a trial. None: no codec."""
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
        """Encode and decode a piece of the object, a different one each time."""
        size = min(PIECE, header.nbytes)
        at = number * PIECE % max(1, header.nbytes - size + 1) // PAGE * PAGE
        piece = payload[at : at + size]
        if not (room := max_encoded_bytes(size)):
            return  # too small for any codec
        memory = scratch.take(2 * PIECE)
        layout, shard = header.layout, header.name.shard
        began = self._clock()
        encoded_bytes = codec.encode(piece, memory[:room], layout, shard)
        encoded_at = self._clock()
        if encoded_bytes:
            try:
                codec.decode(memory[:encoded_bytes], memory[PIECE : PIECE + size], layout, shard)
            except NotDecodable as error:  # it cannot read its own output, so it is never used
                log.error("lmtier: %s failed on its own bytes: %s", codec.name, error)
                return
        ended = self._clock()
        memory[:] = bytes(len(memory))  # a sealed tier leaves nothing readable behind
        with self._lock:
            trials = self._trials.setdefault(codec.name, _Trials())
            trials.encode.add((encoded_at - began) / size)
            trials.decode.add((ended - encoded_at) / size if encoded_bytes else 0.0)
            trials.left.add(encoded_bytes / size if encoded_bytes else 1.0)
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
        """Seconds to write and read a byte. Until there was a read, reading counts as fast as writing."""
        write = self._write.value or 0.0
        read = write if self._read.value is None else self._read.value
        encode, decode, left = (each.value or 0.0 for each in (trials.encode, trials.decode, trials.left))
        return encode + decode + left * (write + read)

    @staticmethod
    def _reasons(costs: dict[str, float]) -> str:
        return ", ".join(f"{name} {seconds * 1e9:.1f} s/GB" for name, seconds in costs.items())
