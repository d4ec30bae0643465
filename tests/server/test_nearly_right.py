"""Engines that are nearly right, beside one that is right and a Redis client: nobody else notices.

The two beside them look at every byte that they get back, and ask for a sign of life while a batch is under
way: what that takes is the freeze that others see.

    pytest tests/server/test_nearly_right.py -s -k 1,000,000 -m long      LMTIER_FUZZ_SEED makes another run
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.server.nearly import CHUNK, Nearly
from tests.server.process import MIB, served
from tests.server.witness import Witness, assert_nothing_is_left, end_pins

SEED = int(os.environ.get("LMTIER_FUZZ_SEED", "2026"))


@pytest.mark.parametrize(
    "verbs",
    [
        pytest.param(30_000, id="30,000"),
        pytest.param(1_000_000, id="1,000,000", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_verbs_that_are_nearly_right_harm_nobody(tmp_path: Path, verbs: int):
    tiers = ("cpu://?capacity=2MiB", f"disk://{tmp_path}/kv?capacity=4MiB")
    config = {"chunk_tokens": CHUNK, "prefault": True}
    with served(tmp_path, *tiers, config=config, unix=str(tmp_path / "socket")) as server:
        nearly, witness = Nearly(server, SEED), Witness(server, SEED)
        warm = began = batches = 0.0
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
                # Two rings of 65,536 changes, which `lmtier explain` reads, are full after 500,000 verbs.
                if not warm and nearly.sent > verbs * 2 // 3:
                    warm, began = server.rss(), time.monotonic()
        except BaseException:
            print(f"seed {SEED}, {nearly.sent} verbs; the last batch: {speaker.asked!r}")
            raise
        grown, seconds = server.rss() - warm, time.monotonic() - began
        nearly.close()
        witness.close()
        print(
            f"{nearly.sent:,} verbs, {nearly.refused:,} refused, {nearly.granted:,} granted; {witness}; "
            f"{grown / MIB:.1f} MiB grown in the last {seconds:.0f} s"
        )
        assert nearly.refused > verbs / 4
        assert nearly.granted > verbs / 4
        assert witness.chunks > batches / 16
        assert witness.values > batches / 16
        assert witness.frozen < 1
        assert grown < 8 * MIB
        assert_nothing_is_left(server)
        assert b"Traceback" not in server.log.read_bytes()
