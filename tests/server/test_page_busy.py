"""The live page of a server that works, in a real browser: also the pictures in the documentation.

LMTIER_PICTURE=docs/page.png pytest tests/server/test_page_busy.py -m slow
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.format.layout import Layout, form_of
from lmtier.observe.prompts import Origin
from tests.browser import Browser
from tests.client.test_client import Server

C = 256
LAYOUT = Layout.uniform(
    layers=4, heads=2, head_dim=8, dtype="bf16", block_tokens=16, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
MODEL = Identity(model="qwen3-8b", weights="9c925d64")
SECONDS = 45.0


def serve_prompt(client: Client, tokens: list[int], salt: str = "") -> None:
    """As an engine does."""
    whole = (len(tokens) - 1) // C
    keys = KeyChain(seed(MODEL, C, salt=salt), C, tokens[: whole * C]).keys
    match = client.match(keys, FORM, tokens=len(tokens))
    client.send_tokens(keys, tokens[: whole * C], Origin.of({"model": MODEL.model}, "", salt))
    client.wait(match)
    client.release(match)
    reservation = client.reserve(keys, FORM, first=match.chunks)
    if reservation.chunks:
        client.commit(reservation)


def work(client: Client, seconds: float, dice: random.Random) -> None:
    """Conversations that grow; the popular ones come back more often than memory can keep the others."""
    system = [dice.randrange(50_000) for _ in range(4 * C + 100)]
    talks = [list(system) for _ in range(150)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        talk = talks[min(149, int(dice.paretovariate(0.6)) - 1)]
        if len(talk) > 40 * C:
            talk[len(system) :] = []
        talk += [dice.randrange(50_000) for _ in range(dice.randrange(100, 900))]
        serve_prompt(client, talk)
        time.sleep(0.02)
    serve_prompt(client, talks[149])
    serve_prompt(client, [*talks[0][:1500], 7, *talks[0][1501:]])
    serve_prompt(client, talks[0], salt="another tenant")


@pytest.mark.slow
def test_a_busy_server_answers_all_five_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture_of = Path(os.environ["LMTIER_PICTURE"]).absolute() if "LMTIER_PICTURE" in os.environ else None
    monkeypatch.setenv("HOME", str(tmp_path))  # so that the tier's path says nothing of who made the picture
    server = Server(
        tmp_path,
        "cpu://?capacity=16MiB",
        "disk://~/kv?capacity=96MiB",
        config={"chunk_tokens": C},
        unix=f"{tmp_path}/unix",
        http="127.0.0.1:0",
    )
    try:
        with Client(server.path, name="vllm scheduler") as client, Browser(tmp_path / "browser") as browser:
            work(client, SECONDS, random.Random(5))
            browser.open(f"http://{server.where['http']}/", width=1440, height=900)
            misses = "document.querySelector('[data-table=\"the last prompts that missed\"]')"
            browser.until(misses)
            browser.evaluate("document.querySelector('input[value=\"1\"]').click()")
            browser.until("document.querySelectorAll('#rate rect').length > 20")
            words = browser.evaluate(f"{misses}.textContent")
            assert "the same tokens are: salt differs" in words
            assert "differs from token 1,500 on" in words
            curve = browser.evaluate(
                "[...document.querySelectorAll('[data-table=curve] [data-row=cpu] data')].map(d => +d.value)"
            )[2:]
            assert curve == sorted(curve)
            assert 0 < curve[0] < curve[-1] <= 1
            assert browser.complaints == []
            picture = tmp_path / "page.png"
            browser.picture(picture)
            browser.dark(True)
            browser.picture(picture.with_stem("page-dark"))
            if picture_of is not None:
                picture_of.write_bytes(picture.read_bytes())
                dark = picture_of.with_stem(f"{picture_of.stem}-dark")
                dark.write_bytes(picture.with_stem("page-dark").read_bytes())
    finally:
        server.kill()
