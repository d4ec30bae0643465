"""Engines that are nearly right, beside one that is right and a Redis client: nobody else notices.

The two beside them look at every byte that they get back, and ask for a sign of life while a batch is under
way: what that takes is the freeze that others see.

    pytest -m long tests/server/test_nearly_right.py -s      LMTIER_FUZZ_SEED makes another run
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.server.nearly import CHUNK, Nearly
from tests.server.process import MIB, Served, served, until
from tests.server.witness import Witness, assert_nothing_is_left, end_pins

SEED = int(os.environ.get("LMTIER_FUZZ_SEED", "2026"))


def at_rest(server: Served, nearly: Nearly) -> int:
    """The server's bytes when the engines have ended.

    While they live, it holds for them what they forget to release: thousands of matches of 1.4 KB each.
    """
    nearly.close()
    end_pins(server)
    until(lambda: server.held()[0] == 0)
    return server.rss()


@pytest.mark.parametrize(
    "verbs",
    [
        pytest.param(30_000, id="30,000"),
        pytest.param(1_000_000, id="1,000,000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_verbs_that_are_nearly_right_harm_nobody(tmp_path: Path, verbs: int):
    tiers = ("cpu://?capacity=2MiB", f"disk://{tmp_path}/kv?capacity=4MiB")
    config = {"chunk_tokens": CHUNK, "prefault": True, "load_deadline": 2.0}
    with served(tmp_path, *tiers, config=config, unix=str(tmp_path / "socket")) as server:
        nearly, witness = Nearly(server, SEED), Witness(server, SEED)
        warm = batches = 0
        try:
            while nearly.sent < verbs:
                speaker = nearly.batch(64)
                witness.look()
                nearly.hear(speaker)
                batches += 1
                if batches % 8 == 0:
                    witness.use()
                if batches % 512 == 0:  # pins with spoilt names last, and keep half of each tier
                    end_pins(server)
                # The journal of what was not stored is full after 500,000 verbs.
                if not warm and nearly.sent > verbs * 2 // 3:
                    warm, began = at_rest(server, nearly), time.monotonic()
                    nearly.begin_all()
        except BaseException:
            print(f"seed {SEED}, {nearly.sent} verbs; the last batch: {speaker.asked!r}")
            raise
        grown, seconds = at_rest(server, nearly) - warm, time.monotonic() - began
        witness.close()
        print(
            f"{nearly.sent:,} verbs, {nearly.refused:,} refused, {nearly.granted:,} granted; {witness}; "
            f"{grown / MIB:.1f} MiB grown in the last {seconds:.0f} s"
        )
        assert nearly.refused > verbs / 4
        assert nearly.granted > verbs / 4
        assert witness.chunks > batches / 4  # of batches / 2
        assert witness.values > batches / 12  # of batches / 8
        assert witness.frozen < 1
        assert grown < 8 * MIB
        assert_nothing_is_left(server)
        assert b"Traceback" not in server.log.read_bytes()
