"""codec=auto: what it chooses on links and cores of known speed, and that it does not swing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from lmtier.format.autocodec import EVERY, PIECE, AutoCodec
from lmtier.format.compression import WORDS
from lmtier.format.keys import VALUES
from lmtier.format.layout import Name
from lmtier.format.objects import Header, Scratch
from lmtier.testing import MemoryTier, Sample, load, sample, store
from tests.kv_bytes import kv_sample, layout_of

GB = 1e9
SPEEDS = {"lz4": (3.0, 3.0), "bitshuffle-lz4": (1.2, 2.2), "shuffle-zstd": (0.4, 1.1)}
"""GB/s to encode and decode, of a core that does nothing else."""


class Core:
    """A clock that shows what a trial takes on this core: called before, between and after."""

    def __init__(self, slower: float = 1.0) -> None:
        self.slower = slower
        self.nbytes = 0
        self._now = 0.0
        self._times = self._show()

    def __call__(self) -> float:
        return next(self._times)

    def _show(self) -> Iterator[float]:
        while True:
            for encode, decode in SPEEDS.values():
                yield self._now
                for speed in (encode, decode):
                    self._now += self.nbytes / (speed * GB) * self.slower
                    yield self._now


def objects(auto: AutoCodec, core: Core, each: Sample, count: int, write: float, read: float = 0.0) -> str:
    """Store so many at `write` GB/s (and load them at `read`); what it uses in the end."""
    scratch = Scratch()
    core.nbytes = min(PIECE, each.header.nbytes)
    for _ in range(count):
        codec = auto.pick(each.header, each.payload, scratch)
        assert (codec.name if codec else "raw") == auto.name
        auto.wrote(1 << 20, (1 << 20) / (write * GB))
        if read:
            auto.read(1 << 20, (1 << 20) / (read * GB))
    return auto.name


KV = kv_sample(1, layout_of(layers=40))


@pytest.mark.parametrize(
    ("link", "best"),
    [
        (10, "raw"),
        (2, "raw"),
        (1, "raw"),
        (0.15, "bitshuffle-lz4"),
        (0.05, "shuffle-zstd"),
        (0.001, "shuffle-zstd"),
    ],
)
def test_each_link_gets_the_codec_that_is_worth_it_there(link, best):
    core = Core()
    assert objects(AutoCodec(core), core, KV, 5, link, link) == best


def test_a_busy_core_encodes_less():
    core = Core(slower=20)
    assert objects(AutoCodec(core), core, KV, 5, 0.05, 0.05) == "raw"


def test_what_does_not_shrink_is_left_alone_on_any_link():
    core, each = Core(), sample(1, 1 << 20)
    assert objects(AutoCodec(core), core, each, 5, 0.001, 0.001) == "raw"


def test_it_follows_the_link_and_does_not_swing():
    core = Core()
    auto = AutoCodec(core)
    assert objects(auto, core, KV, 5, 5, 5) == "raw"
    assert objects(auto, core, KV, 20 * EVERY, 0.02, 0.02) == "shuffle-zstd"
    before = auto.name
    for link in (0.1, 0.14, 0.12) * 3:  # where the two are about as good
        assert objects(auto, core, KV, 3 * EVERY, link, link) == before
    assert objects(auto, core, KV, 20 * EVERY, 5, 5) == "raw"


def test_slow_reads_count_as_much_as_slow_writes():
    core = Core()
    assert objects(AutoCodec(core), core, KV, 5, 10, 0.02) == "shuffle-zstd"


def test_named_values_and_small_objects_teach_it_nothing():
    core, each = Core(), sample(2, 3000)
    auto, scratch = AutoCodec(core), Scratch()
    value = Header(Name(VALUES + bytes(28), KV.name.shard), KV.header.layout, KV.header.nbytes)
    for _ in range(10):
        assert auto.pick(value, KV.payload, scratch) is None
        assert auto.pick(each.header, each.payload, scratch) is None
    assert core() == 0


def test_trying_takes_two_pieces_of_memory_whatever_the_size_of_the_objects():
    scratch = Scratch()
    auto, each = AutoCodec(), kv_sample(3, layout_of(layers=300))
    assert each.header.nbytes > 3 * PIECE
    for _ in range(3):
        auto.pick(each.header, each.payload, scratch)
    assert len(scratch._memory) == 2 * PIECE


def test_a_tier_that_chooses_gives_back_what_it_got():
    samples = [kv_sample(i) for i in range(8)]
    with closing(MemoryTier()) as tier:
        tier.use_codec("auto")
        for each in samples:
            assert not store(tier, each).failed
            done, got = load(tier, each.name, each.room)
            assert not done.failed
            assert got == each.payload
        assert tier.codec in WORDS
        assert tier.codec != "auto"
