"""Who uses a server rightly while others do not: what they get, how long they wait, what is left behind."""

from __future__ import annotations

import hashlib
import random
import time

from lmtier.client.client import Client
from lmtier.format.layout import Layout, form_of
from tests.server.nearly import CHUNK
from tests.server.process import Served, Wire, until
from tests.stopwatch import Stopwatch

LAYOUT = Layout.uniform(
    layers=2, heads=2, head_dim=16, dtype="fp16", block_tokens=4, chunk_tokens=CHUNK, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
SIZE = LAYOUT.nbytes(LAYOUT.whole)


def content(name: bytes, size: int) -> bytes:
    return (hashlib.sha256(name).digest() * (size // 32 + 1))[:size]


class Witness:
    """An engine and a Redis client that do everything right."""

    def __init__(self, server: Served, seed: int) -> None:
        self.chance = random.Random(seed)
        self.wire = server.connect()
        self.client = Client(server.where["unix"], timeout=20)
        self._server = server
        self.chunks = self.values = self.longest = self.frozen = 0.0

    def look(self) -> None:
        """One sign of life, while the server has other work."""
        began, watch = time.monotonic(), Stopwatch(self._server.process.pid)
        self.wire.expect("PONG", "PING")
        self.longest = max(self.longest, time.monotonic() - began)
        self.frozen = max(self.frozen, watch.seconds())

    def use(self) -> None:
        chance, client = self.chance, self.client
        names = [hashlib.sha256(b"%d/%d" % (chance.randrange(6), i)).digest() for i in range(4)]
        match = client.wait(client.match(names, FORM))
        for key, offsets in match.grant.places:
            assert client.slab.view(offsets[0], SIZE) == content(key, SIZE), "wrong bytes"
            self.chunks += 1
        client.release(match)
        reservation = client.reserve(names, FORM)
        for key, offsets in reservation.places:
            client.slab.view(offsets[0], SIZE)[:] = content(key, SIZE)
        client.commit(reservation)
        name = b"witness %d" % chance.randrange(20)
        value = self.wire.ask("GET", name)
        assert value in (None, content(name, 3000)), "wrong bytes"
        self.values += value is not None
        self.wire.ask("SET", name, content(name, 3000))

    def __str__(self) -> str:
        return (
            f"beside them {self.chunks:,.0f} chunks and {self.values:,.0f} values were right, and the "
            f"longest wait for a PING was {self.longest:.3f} s, {self.frozen:.3f} s of it with a core"
        )

    def close(self) -> None:
        assert self.client.lost == self.client.unserved == 0
        self.client.close()
        self.wire.close()


def end_pins(server: Served) -> None:
    """As an operator does who sees names that no engine should have given."""
    for pin in server.call("/api/pins"):
        server.call("/api/unpin", {"name": pin["name"]})


def assert_nothing_is_left(server: Served) -> None:
    """When all have gone and everything is deleted, no byte is taken."""
    end_pins(server)
    server.check()
    with Wire(server.where["unix"]) as wire:
        wire.expect("OK", "FLUSHALL")
        server.call("/api/clear", {"force": True})
        until(lambda: wire.ask("LMTIER.FLUSH", 1000) == 1)
        report = server.report()
        assert [tier["used"] for tier in report["tiers"]] == [0, 0], report["tiers"]
