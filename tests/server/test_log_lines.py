"""What a server logs, and what it does not: a client too many, an idle browser, a tier that recovers."""

import json
import logging
import socket

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import form_of
from lmtier.testing import FlakyTier, MemoryTier, opaque_layout
from lmtier.tiers.base import Op
from tests.server.process import Served, served, until

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))


def lines(server):
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def test_one_client_too_many_is_refused_and_logged(tmp_path):
    server = Served(tmp_path, clients=3, log_format="json")  # one place is kept for engines
    try:
        with server.connect(), server.connect() as second, server.connect() as third:
            second.expect("PONG", "PING")
            assert third.reply() == "ERR max number of clients reached"
            address = "{}:{}".format(*third.socket.getsockname())
            until(lambda: any(line["level"] == "warning" for line in lines(server)))
            (line,) = (line for line in lines(server) if line["level"] == "warning")
            assert line["message"] == (
                f"{address} was refused, because 2 clients are connected: close some, or raise serve.clients"
            )
    finally:
        server.kill()


def test_a_silent_browser_is_closed_without_a_warning(tmp_path):
    with served(tmp_path, http="127.0.0.1:0", patience=0.2, log_format="json", log_level="debug") as server:
        host, _, port = server.where["http"].rpartition(":")
        with socket.create_connection((host, int(port)), 20) as idle:
            assert idle.recv(1) == b"", "its patience is over"
        assert not [line for line in lines(server) if line["level"] in ("warning", "error")]


def test_a_failing_tier_warns_and_its_recovery_does_not(caplog):
    url = "null://"
    flaky = FlakyTier(MemoryTier(), every=1, ops=(Op.STORE,))
    config = Config(tiers=["cpu://?capacity=1MiB", url], chunk_tokens=1, prefault=False)
    with caplog.at_level(logging.INFO, "lmtier"), Cache(config, tiers={url: flaky}) as cache:

        def store(number):
            reservation = cache.reserve([number.to_bytes(32, "big")], FORM)
            if reservation.chunks:
                cache.commit(reservation)
            cache.flush(0.5)

        for number in range(1, 8):
            store(number)
        (tier,) = cache.lower
        assert tier.store_breaker.is_open
        flaky._every = 1 << 30
        until(lambda: tier.store_breaker.allows())
        for number in range(8, 12):
            store(number)
        assert not tier.store_breaker.is_open
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert any(level == "WARNING" and "keeps failing and is paused" in text for level, text in said)
    assert ("INFO", "lmtier: tier null: store works again") in said
