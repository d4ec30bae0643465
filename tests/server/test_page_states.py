"""The live page in each state that an operator may meet: its verdicts are the case, and it looks well.

    LMTIER_PICTURES=docs/page pytest tests/server/test_page_states.py -m slow

Real servers, a real Redis that is killed, and a real browser. The variable writes the pictures of the docs.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmtier.client.client import Client
from lmtier.format.keys import Identity, KeyChain, seed
from lmtier.format.layout import Layout, form_of
from lmtier.rules.worth import Cost
from lmtier.server.verdicts import LOST
from tests.browser import Browser
from tests.client.test_client import Server
from tests.redis_process import RedisServer
from tests.server.process import until
from tests.stopping import stop

pytestmark = pytest.mark.slow

C = 256
LAYOUT = Layout.uniform(
    layers=4, heads=2, head_dim=8, dtype="bf16", block_tokens=16, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
DESK: dict[str, Any] = {"width": 1440, "height": 900}
PHONE: dict[str, Any] = {"width": 390, "height": 844}
VERDICTS = ("working", "saves", "misses", "bottleneck", "memory")
LINES = """Object.fromEntries([...document.querySelectorAll(".verdict")].map(each => [each.dataset.verdict,
    [each.dataset.state, each.querySelector(".word").innerText, each.querySelector(".why").innerText]]))"""
BOTTOM = """Math.max(...[...document.querySelectorAll(".verdict > summary")]
    .map(each => each.getBoundingClientRect().bottom))"""


def model(name: str) -> Identity:
    return Identity(model=name, weights="9c925d64")


class State:
    """One server, with what it needs, and the browser that looks at it."""

    def __init__(self, folder: Path, browser: Browser, later: ExitStack) -> None:
        self.folder, self.browser, self.later = folder, browser, later
        self.pictures = (
            Path(os.environ["LMTIER_PICTURES"]).absolute() if "LMTIER_PICTURES" in os.environ else None
        )

    def serve(self, *tiers: str, cpu: str = "16MiB", **settings: Any) -> Server:
        # "~", so that the tier's path says nothing of who made the picture
        server = Server(
            self.folder,
            f"cpu://?capacity={cpu}",
            *tiers,
            config={"chunk_tokens": C},
            unix=f"{self.folder}/unix",
            http="127.0.0.1:0",
            **settings,
        )
        self.later.callback(server.kill)
        self.server = server
        return server

    def client(self, name: str = "vllm scheduler") -> Client:
        return self.later.enter_context(Client(self.server.path, name=name))

    def redis(self) -> RedisServer:
        redis = RedisServer(self.folder / "redis")
        self.later.callback(redis.kill)
        return redis

    def verdicts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.browser.evaluate(LINES)
        return {name: [part.replace("\u00a0", " ") for part in found[name]] for name in VERDICTS}

    def look(self, name: str, until: str = "true", **screen: Any) -> dict[str, list[str]]:
        """Open the page, wait, check that the five lines are on one screen, and take its picture."""
        for dark in (False, True):
            for size, suffix in ((DESK, ""), (PHONE, "-phone")):
                if dark and suffix:
                    continue
                self.browser.open(f"http://{self.server.where['http']}/", dark=dark, **size)
                self.browser.until("view !== null && document.querySelector('.why').innerText")
                self.browser.until(until)
                assert self.browser.evaluate(BOTTOM) <= size["height"], "the five answers fit on one screen"
                assert self.browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
                if not suffix or name == "dead-tier":
                    self.picture(f"{name}{'-dark' if dark else ''}{suffix}")
        assert self.browser.complaints == []
        return self.verdicts()

    def picture(self, name: str) -> None:
        if self.pictures is not None:
            self.pictures.mkdir(exist_ok=True)
            self.browser.picture(self.pictures / f"{name}.png")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def state(tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setenv("HOME", str(tmp_path))
    browser.complaints.clear()
    with ExitStack() as later:
        later.callback(browser.call, "Page.navigate", url="about:blank")
        yield State(tmp_path, browser, later)


def ask(client: Client, tokens: list[int], identity: Identity) -> None:
    """As an engine does: look a prompt up, load what is there, store the rest."""
    whole = (len(tokens) - 1) // C
    keys = KeyChain(seed(identity, C), C, tokens[: whole * C]).keys
    client.declare(identity, FORM)
    match = client.match(keys, FORM, tokens=len(tokens))
    client.wait(match)
    client.release(match)
    reservation = client.reserve(keys, FORM, first=match.chunks)
    if reservation.chunks:
        client.commit(reservation)


def talk(client: Client, times: int, name: str = "qwen3-8b", prompts: int = 20, dice: int = 5) -> None:
    """Prompts of six chunks that come back at random, some of them often."""
    random_ = random.Random(dice)
    texts = [[random_.randrange(50_000) for _ in range(6 * C + 30)] for _ in range(prompts)]
    for _ in range(times):
        ask(client, texts[min(prompts - 1, int(random_.paretovariate(0.8)) - 1)], model(name))


def settle(state: State, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The report, once the condition is true of it."""
    until(lambda: condition(state.server.report()), 30.0)
    report: dict[str, Any] = state.server.report()
    return report


# ---- the states


def test_nobody_has_asked_yet(state: State) -> None:
    state.serve()
    verdicts = state.look("idle")
    assert verdicts["working"] == ["good", "yes", "cpu works; no engine is connected"]
    assert [verdicts[name][0] for name in ("saves", "misses", "memory")] == ["idle"] * 3
    assert verdicts["memory"][1:] == ["too early", "0 of the 50 lookups that a verdict needs"]
    name = f"{socket.gethostname()}, {state.server.where['redis']}"
    assert state.browser.evaluate("document.querySelector('#server').innerText") == name
    assert state.browser.evaluate("document.title") == f"{name} · lmtier"
    assert verdicts["bottleneck"][:2] == ["good", "none"]
    assert "No prompt was looked up" in state.browser.evaluate(
        "document.querySelector('#headline').innerText"
    )


def test_verdicts_wait_for_enough_lookups_and_some_reuse(
    state: State,
) -> None:
    state.serve(cpu="64MiB")
    client = state.client()
    ask(client, list(range(2 * C + 30)), model("qwen3-8b"))
    verdicts = state.look(
        "too-early", "document.querySelector('[data-row=asked]').textContent.includes('in 1 lookup')"
    )
    needed = "1 of the 50 lookups that a verdict needs"
    assert verdicts["saves"] == ["idle", "too early", f"0 of 542 tokens were not computed again, in {needed}"]
    assert verdicts["misses"] == ["idle", "too early", f"0 % could have been hits, in {needed}"]
    assert verdicts["memory"] == ["idle", "too early", needed]
    for number in range(1, 50):
        ask(client, [number] * (C + 30), model("qwen3-8b"))
    verdicts = state.look(
        "nothing-came-back",
        "document.querySelector('[data-row=asked]').textContent.includes('50 lookups')",
    )
    assert verdicts["saves"][:2] == ["warn", "0 %"]
    text = "no prompt came back, so memory of any size would hit nothing"
    assert verdicts["memory"] == ["idle", "no use yet", text]
    state.browser.evaluate("document.querySelector('[data-verdict=saves]').open = true")
    sessions = state.browser.evaluate("document.querySelector('[data-table=\"agent sessions\"]')")
    assert sessions is None, "prompts without a session's name are no agent sessions"


def test_a_missing_directory_is_named_as_one_outage(state: State) -> None:
    # Not "~", which the error would spell out: its path says nothing of who made the picture either.
    home = Path(state.later.enter_context(tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp")), "disk")
    state.serve(f"disk://{home}?capacity=64MiB", cpu="64MiB")
    client, numbers = state.client(), iter(range(10**6))
    talk(client, 60)
    settle(state, lambda report: report["tiers"][1]["chunks"] and not report["tiers"][1]["queue"])
    shutil.rmtree(home)

    def outage(report: dict[str, Any]) -> dict[str, Any]:
        """Of the stores, which go on."""
        ask(client, [next(numbers)] * (C + 30), model("qwen3-8b"))
        found = [each for each in report["tiers"][1]["outages"] if each["what"] == "stores"]
        return found[0] if found else {"since": report["time"], "until": None}

    report = settle(state, lambda report: report["time"] > outage(report)["since"] + 2)
    began = outage(report)["since"]
    client.clear()  # which deletes files that are not there
    report = settle(state, lambda report: outage(report)["until"] is None and report["time"] > began + 4)
    assert abs(outage(report)["since"] - began) < 1
    verdicts = state.look("disk-gone")
    assert verdicts["working"][:2] == ["bad", "disk is down"]
    words = rf"stores have failed for (\d+) s: No such file or directory: {home}"
    found = re.fullmatch(words, verdicts["working"][2])
    assert found, verdicts["working"]
    assert int(found[1]) >= 4
    log = state.server.log.read_text()
    assert f"store keeps failing and is paused for now: No such file or directory: {home}\n" in log
    assert "works again" not in log


def test_a_few_tokens_that_were_not_stored_are_no_trouble(state: State) -> None:
    """The alert wants 5 %, and so does the page."""
    state.serve(cpu="64MiB")
    client, numbers = state.client(), iter(range(10**6))

    def give_up(times: int) -> None:
        for _ in range(times):
            chain = KeyChain(seed(model("m"), C), C, [next(numbers)] * C)
            client.abort(client.reserve(chain.keys, FORM))

    talk(client, 60)
    give_up(1)
    assert settle(state, lambda report: report["counted"]["dropped"])["counted"]["dropped"] == {
        "cpu aborted": C
    }
    verdicts = state.look("few-losses")
    assert verdicts["working"] == ["good", "yes", "cpu works; 1 engine connection"]
    give_up(99)
    settle(state, lambda report: report["counted"]["dropped"] == {"cpu aborted": 100 * C})
    verdicts = state.look("losses")
    assert verdicts["working"][:2] == ["warn", "with losses"]
    assert re.match(
        r"25\.6K tokens not stored in cpu \([\d.]+ %, aborted\) in the last ", verdicts["working"][2]
    )


def test_memory_alone(state: State) -> None:
    state.serve(cpu="64MiB")
    client = state.client()
    talk(client, 200)
    verdicts = state.look("memory-alone", "document.querySelectorAll('#rate rect').length > 1")
    assert verdicts["working"] == ["good", "yes", "cpu works; 1 engine connection"]
    assert verdicts["saves"][0] == "good"
    assert verdicts["misses"] == [
        "good",
        "none",
        "that could have been hits: the rest is new text, or was not worth loading",
    ]
    assert verdicts["memory"][0] == "good"


def test_memory_that_is_too_small_over_a_disk(state: State) -> None:
    state.serve("disk://~/kv?capacity=16MiB", cpu="3MiB", gpu_hour="$2.50")
    client = state.client()
    client.costs(Cost(0.01, 1e-3, 1e-9, 1e-8))
    talk(client, 400, prompts=150)
    verdicts = state.look("one-tier", "document.querySelectorAll('#rate rect').length > 1")
    tokens = state.server.report()["counted"]
    lost = sum(tokens["dropped"].values())
    stored = lost + tokens["stored"]["disk"]
    if lost > LOST * stored:  # memory is so small that chunks may leave it before the disk has them
        assert verdicts["working"][:2] == ["warn", "with losses"]
        assert "evicted before write)" in verdicts["working"][2]
    else:
        assert verdicts["working"] == ["good", "yes", "cpu and disk work; 1 engine connection"]
    for name in ("misses", "bottleneck", "memory"):
        state.browser.evaluate(f"document.querySelector('[data-verdict={name}]').open = true")
    state.browser.resize(1440, 2000)
    state.picture("details")
    curve = state.server.report()["curve"]
    gain = max(each["2"] for each in curve.values()) - max(each["1"] for each in curve.values())
    assert (verdicts["memory"][0] == "warn") == (gain >= 0.05)


def test_five_tiers(state: State) -> None:
    redis = state.redis()
    state.serve(
        *(f"disk://~/{name}?capacity=64MiB" for name in ("nvme", "ssd", "hdd")),
        *(f"redis://127.0.0.1:{redis.port}/{db}?deadline=15s" for db in (0, 1)),
        cpu="64MiB",  # all chunks fit, so a slow disk loses none
    )
    talk(state.client(), 100, prompts=60)
    verdicts = state.look("five-tiers", "document.querySelectorAll('#rate rect').length > 1")
    assert verdicts["working"][1:] == [
        "yes",
        "cpu, disk, disk-2, disk-3, redis and redis-2 work; 1 engine connection",
    ]


def test_a_tier_that_dies_shows_until_it_is_back(state: State) -> None:
    redis = state.redis()
    # All chunks fit into the memory, so that a slow disk loses none.
    state.serve("disk://~/kv?capacity=64MiB", f"redis://127.0.0.1:{redis.port}/0", cpu="64MiB")
    client = state.client()
    talk(client, 100)
    redis.kill()

    def is_down(report: dict[str, Any]) -> bool:
        talk(client, 5, dice=report["counted"]["lookups"])
        working = report["verdicts"][0]
        return working["state"] == "bad" and "Connection refused" in str(working["text"])

    settle(state, is_down)
    verdicts = state.look("dead-tier")
    assert verdicts["working"][:2] == ["bad", "redis is down"]
    assert "have failed for" in verdicts["working"][2]
    assert "Connection refused" in verdicts["working"][2]
    redis.start()

    def is_back(report: dict[str, Any]) -> bool:
        talk(client, 5, dice=report["counted"]["lookups"])
        return not any(each["until"] is None for tier in report["tiers"] for each in tier["outages"])

    settle(state, is_back)
    verdicts = state.look("recovered-tier")
    assert verdicts["working"][:2] == ["good", "yes, again"], verdicts["working"]
    assert verdicts["working"][2].startswith("redis has worked for")
    state.browser.evaluate("document.querySelector('[data-verdict=working]').open = true")
    rows = "[...document.querySelectorAll('[data-table=outages] tbody tr')]"
    outages = state.browser.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText))")
    assert all(tier == "redis" and until != "–" for tier, _, _, until, _ in outages)
    assert outages
    state.picture("recovered-tier-details")


def test_a_server_that_stands_still(state: State) -> None:
    state.serve(cpu="64MiB")
    talk(state.client(), 100)
    state.browser.open(f"http://{state.server.where['http']}/", **DESK)
    state.browser.until("view !== null && document.querySelector('.why').innerText")
    stop(state.server.process.pid)
    try:
        state.browser.until("document.querySelector('#state').innerText === 'unreachable'")
        verdicts = state.verdicts()
        assert verdicts["working"][:2] == ["bad", "no answer"]
        assert "last seen" in verdicts["working"][2]
        state.picture("stalled")
    finally:
        state.server.process.send_signal(signal.SIGCONT)
    state.browser.until("document.querySelector('#state').innerText === 'live'")
    assert state.verdicts()["working"][:2] == ["good", "yes"]


def test_redis_clients_only(state: State) -> None:
    server = state.serve(cpu="64MiB")
    with ExitStack() as clients:
        wires = [clients.enter_context(server.connect()) for _ in range(20)]
        for number, wire in enumerate(wires):
            for turn in range(40):
                wire.expect("OK", "SET", f"value:{turn}", "x" * 40_000)
                wire.ask("GET", f"value:{(turn * 7 + number) % 44}")
        verdicts = state.look("redis-clients", "document.querySelectorAll('#rate rect').length > 1")
        values = server.report()["counted"]["values"]
    assert verdicts["working"][2].startswith("cpu works; 2")
    assert "Redis clients" in verdicts["working"][2]
    share = values["hit"] / (values["hit"] + values["missed"])
    assert verdicts["saves"][0] == "good"
    assert abs(float(verdicts["saves"][1].split()[0]) / 100 - share) < 0.01
    assert "that Redis clients asked for" in verdicts["saves"][2]
    headline = state.browser.evaluate("document.querySelector('#headline').innerText")
    assert "that Redis clients read" in headline


def test_redis_clients_that_found_nothing(state: State) -> None:
    with state.serve(cpu="64MiB").connect() as wire:
        for turn in range(40):
            wire.expect(None, "GET", f"value:{turn}")
        state.look("redis-misses", "document.querySelector('#headline').innerText.includes('Redis')")
    headline = state.browser.evaluate("document.querySelector('#headline').innerText")
    assert headline.replace("\u00a0", " ").startswith("0 % of the 40 values")


def test_twenty_models(state: State) -> None:
    state.serve("disk://~/kv?capacity=256MiB", cpu="128MiB")
    client = state.client()
    for number in range(20):
        talk(client, 10 + 4 * number, f"org/model-{number:02}", prompts=3 + number, dice=number)
    verdicts = state.look("twenty-models", "document.querySelectorAll('#rate rect').length > 1")
    assert verdicts["working"][0] == "good"
    state.browser.evaluate("document.querySelector('[data-verdict=saves]').open = true")
    names = state.browser.evaluate(
        "[...document.querySelectorAll('[data-table=models] tbody tr')].map(row => row.dataset.row)"
    )
    assert sorted(names) == [f"org/model-{number:02}" for number in range(20)]
    report = state.server.report()
    assert sum(each["asked"] for each in report["models"]) == report["counted"]["asked"]
    assert sum(each["hit"] for each in report["models"]) == sum(report["counted"]["hit"].values())
    state.picture("twenty-models-details")
