"""The live page in a real browser: true numbers, on a desk and on a phone, by day and by night."""

import contextlib
import hashlib
import re
import socket
import threading
import time
from typing import Any

import pytest

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.layout import form_of, padded
from lmtier.observe.words import percent
from lmtier.server.api import Api
from lmtier.server.commands import Caller
from lmtier.server.explain import Explain
from lmtier.server.http import Http, routes
from lmtier.server.models import Models
from lmtier.server.report import Report
from lmtier.testing import Gate, MemoryTier, SlowTier, opaque_layout
from tests.browser import Browser

LAYOUT = opaque_layout(8192)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
SCREENS: dict[str, dict[str, Any]] = {
    "desk": {},
    "night": {"dark": True},
    "phone": {"width": 390, "height": 844},
    "phone at night": {"width": 390, "height": 844, "dark": True},
}
EVIL = "<img src=x onerror='document.title=1'><script>document.title=2</script>"


def keys(count, name="a"):
    return [hashlib.sha256(f"{name}{i}".encode()).digest() for i in range(count)]


class Server:
    """The smallest loop around the conversations: one connection after the other, on one thread."""

    def __init__(self, cache, port=0):
        self.cache = cache
        self.clients: list[dict[str, object]] = []
        self.asked: list[str] = []
        self.report = Report(cache, lambda: self.clients, time.monotonic())
        self.turn = threading.Lock()
        """A cache has one owner: who holds this."""
        self.explain = Explain(cache)
        api = Api(cache, self.explain, Models(), self.report, lambda steps: steps)
        self._http = Http(routes(cache, self.report), api)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._open = set()
        self._threads = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection):
        conversation = self._http.conversation(Caller(1, "here", kind="http"))
        with connection:
            while True:
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    return
                if not data:
                    return
                self.asked.append(data.split(b" ")[1].decode())
                conversation.feed(data)
                with self.turn:
                    self.report.sample()
                    replies = []
                    while (reply := conversation.next()) is not None or conversation.is_answering:
                        replies += [reply] if reply is not None else []
                try:
                    for reply in replies:
                        connection.sendall(reply.data)
                except OSError:
                    return

    def use(self, *prompts):
        """Look prompts up as an engine does, and store what was missing."""
        with self.turn:
            for prompt in prompts:
                match = self.cache.wait(self.cache.match(prompt, FORM, tokens=len(prompt) + 1))
                reservation = self.cache.reserve(prompt, FORM)
                if reservation.chunks:
                    self.cache.commit(reservation)
                self.cache.release(match)
                self.cache.flush()

    def snapshot(self):
        with self.turn:
            return self.report.snapshot()

    def close(self):
        """Like the end of its process: nobody listens, every connection ends. Idempotent."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # the other side was first
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._threads):
            thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def serve(browser):
    servers = []

    def serve(*tiers, port=0, opened=None, **options):
        top = f"cpu://?capacity={8 * padded(8192)}"
        cache = Cache(Config(tiers=[top, *tiers], chunk_tokens=1, prefault=False), tiers=opened, **options)
        servers.append(Server(cache, port))
        return servers[-1]

    browser.complaints.clear()
    yield serve
    browser.call("Page.navigate", url="about:blank")
    for server in servers:
        server.close()
        server.cache.close(timeout=5)


def visit(browser, server, **screen):
    """Open the page with all its details."""
    browser.open(server.url, **screen)
    browser.until("view !== null && document.querySelector('.verdict')")
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")


def verdict(browser, name):
    """The state and the words of one line."""
    row = f".verdict[data-verdict={name}]"
    state = browser.evaluate(f"document.querySelector({row!r}).dataset.state")
    return state, text(browser, f"{row} .word"), text(browser, f"{row} .why")


def number(browser, table, row, column):
    """A number in a table."""
    cell = f"table[data-table='{table}'] tr[data-row='{row}'] data[data-column='{column}']"
    return float(browser.until(f'document.querySelector("{cell}")?.value'))


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText").replace("\u00a0", " ")


@pytest.mark.parametrize("screen", SCREENS)
def test_the_numbers_on_the_page_are_those_of_the_server(browser, serve, tmp_path, screen):
    server = serve(f"disk://{tmp_path / 'disk'}?capacity=1MiB")
    server.use(keys(5), keys(6, "b"), keys(5), keys(6), keys(4, "b"))
    server.clients = [
        {"name": "engine-0", "kind": "engine", "address": "/run/x", "age": 61.0, "sent": 3 << 30}
    ]
    visit(browser, server, **SCREENS[screen])
    stats, counted = server.snapshot(), server.snapshot()["counted"]
    hits, asked = sum(counted["hit"].values()), counted["asked"]
    assert hits > 0
    assert text(browser, "#headline").startswith(f"{percent(hits / asked)} of the tokens")
    assert f": {hits} tokens that no engine had to compute again." in text(browser, "#headline")
    shown = {"asked": asked, **{f"hit in {tier}": n for tier, n in counted["hit"].items()}}
    shown |= {f"missed: {reason}": n for reason, n in counted["missed"].items()}
    for source, tokens in shown.items():
        assert number(browser, "tokens", source, "lately") == tokens
        assert number(browser, "tokens", source, "since the start") == tokens
        assert number(browser, "tokens", source, "share") == tokens / asked
    for tier in stats["tiers"]:
        name = tier["tier"]
        for column in ("used", "chunks", "queue"):
            assert number(browser, "tiers", name, column) == tier[column]
        for column, way in (("evicted", "evicted"), ("loaded", "up"), ("stored", "down")):
            if counted[way].get(name):
                assert number(browser, "tiers", name, column) == counted[way][name]
    clients = text(browser, "table[data-table=clients]")
    assert "engine-0" in clients
    assert "1 min" in clients
    assert "3 GiB" in clients
    assert text(browser, "#state") == "live"
    assert browser.evaluate("document.querySelectorAll('#rate rect').length") >= 2
    assert "most recently" in browser.evaluate("document.querySelector('#rate').getAttribute('aria-label')")
    browser.screenshot(tmp_path / "page.png")
    assert browser.complaints == []


@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_wider_than_the_screen(browser, serve, screen):
    server = serve("null://")
    server.clients = [
        {"name": "x" * 200, "kind": "engine", "address": "y" * 200, "age": 1e6, "sent": 1 << 50}
    ]
    visit(browser, server, **SCREENS[screen])
    browser.until("document.querySelector('[data-table=clients] tr')")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("screen", SCREENS)
def test_every_word_can_be_read(browser, serve, screen):
    """Contrast of all text with the paper is at least 4.5, as WCAG AA asks."""
    server = serve("null://")
    server.use(keys(3), keys(3))
    visit(browser, server, **SCREENS[screen])
    browser.until("document.querySelector('[data-table=tokens]')")
    low = browser.evaluate(
        """(() => {
            const light = colour => {
                const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(value => value / 255)
                    .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
                return .2126 * r + .7152 * g + .0722 * b;
            };
            const paper = light(getComputedStyle(document.body).backgroundColor), low = [];
            for (const node of document.body.querySelectorAll("*")) {
                if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
                if (!node.getClientRects().length || node.closest("script")) continue;
                const ink = light(getComputedStyle(node).color);
                const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
                if (ratio < 4.5) low.push([node.outerHTML, ratio]);
            }
            return [low, paper];
        })()"""
    )
    assert low[0] == []
    assert (low[1] < 0.1) == ("night" in screen)


@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_shows_five_verdicts_in_their_order(browser, serve, screen):
    server = serve("null://")
    server.use(keys(3), [*keys(2), *keys(2, "b")], keys(20, "c"), keys(3))
    visit(browser, server, **SCREENS[screen])
    misses = "[data-table='the last prompts that missed'] tbody tr"
    browser.until(f'document.querySelector("{misses}")')
    names = browser.evaluate("[...document.querySelectorAll('.question')].map(each => each.innerText)")
    assert names == ["Working", "Saves", "Misses", "Bottleneck", "Memory"]
    for name, shown in zip(names, server.snapshot()["verdicts"], strict=True):
        state, word, why = verdict(browser, name.lower())
        assert shown["name"] == name.lower()
        assert (state, word) == (shown["state"], shown["word"])
        lately = re.compile(r"the last \d+ m?s")  # it goes on between the two looks
        assert name == "Bottleneck" or lately.sub("lately", why) == lately.sub("lately", shown["text"])
    latest = server.explain.recent()[0]
    assert latest["why"].startswith("was evicted from cpu")
    assert "was evicted from cpu" in text(browser, misses)
    assert (
        float(browser.evaluate(f'document.querySelector("{misses} [data-column=asked]").value'))
        == latest["asked"]
        == 4
    )
    for factor, ratio in server.snapshot()["curve"]["cpu"].items():
        assert number(browser, "curve", "cpu", f"× {factor}") == ratio
    assert "%" in text(browser, "[data-table=limits] tr[data-row='the thread']")
    assert "A lookup takes the server's thread" in text(browser, "[data-verdict=bottleneck]")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints == []


def test_the_page_follows_the_server(browser, serve):
    server = serve()
    visit(browser, server)
    browser.until("document.querySelector('#headline').innerText.startsWith('No prompt was looked up')")
    server.use(keys(3), keys(3))
    browser.until("document.querySelector('#headline').innerText.includes(': 3 tokens')")
    assert browser.complaints == []


def test_a_page_opened_later_has_the_past(browser, serve):
    server = serve()
    server.use(keys(3), keys(3))
    visit(browser, server)
    assert number(browser, "tokens", "hit in cpu", "lately") == 3
    browser.evaluate("document.querySelector('input[value=\"1\"]').click()")
    browser.until("view.columns.length === 30")
    assert "of the tokens that were asked in the last" in text(browser, "#headline")
    assert number(browser, "tokens", "hit in cpu", "lately") == 3


def test_a_clients_name_is_text_and_nothing_else(browser, serve):
    server = serve()
    server.clients = [{"name": EVIL, "kind": EVIL, "address": EVIL, "age": 1}]
    visit(browser, server)
    browser.until("document.querySelector('[data-table=clients] tr')")
    assert text(browser, "[data-table=clients] [data-column=name]") == EVIL
    assert browser.evaluate("document.querySelectorAll('img, table script').length") == 0
    assert browser.evaluate("document.title") == "lmtier"
    assert browser.complaints == []


def test_the_page_names_the_sessions_that_saved_most(browser, serve):
    server = serve()
    server.use(keys(3))
    with server.turn:
        for name in ("agent-7", EVIL, EVIL):
            server.cache.release(server.cache.match(keys(3), FORM, session=name))
    visit(browser, server)
    rows = "[...document.querySelectorAll('[data-table=\"agent sessions\"] tbody tr')]"
    browser.until(f"{rows}.length >= 2")
    assert browser.evaluate(f"{rows}.map(each => each.dataset.row)")[:2] == [EVIL, "agent-7"]
    assert "2 agent sessions active, 0 wait for a person" in text(browser, "[data-verdict=saves]")
    assert browser.evaluate("document.querySelectorAll('img, table script').length") == 0
    assert browser.complaints == []


def test_a_server_that_is_not_ready_says_why(browser, serve):
    url, gate = "disk:///memory?capacity=1MiB", Gate()
    server = serve(url, opened={url: SlowTier(MemoryTier(), gate)}, wait_until_warm=False)
    visit(browser, server)
    browser.until("document.querySelector('#state').innerText === 'not ready'")
    assert verdict(browser, "working") == ("warn", "not ready", "the scan of disk is not finished")
    assert text(browser, "#state") == "not ready"
    assert "warming up" in text(browser, "[data-table=tiers] tr[data-row=disk]")
    gate.open()
    with server.turn:
        server.cache.flush()
    browser.until("document.querySelector('#state').innerText === 'live'")
    assert verdict(browser, "working") == ("good", "yes", "cpu and disk work; no engine is connected")


def test_a_lost_server_is_unreachable_until_it_returns(browser, serve):
    server = serve()
    server.use(keys(3), keys(3))
    visit(browser, server)
    server.close()
    browser.until("document.querySelector('#state').innerText === 'unreachable'")
    state, word, why = verdict(browser, "working")
    assert (state, word) == ("bad", "no answer")
    wanted = r"The server does not answer; last seen [\d.]+ s ago; the rest is as it was then"
    assert re.fullmatch(wanted, why)
    assert number(browser, "tokens", "hit in cpu", "lately") == 3, "what was known stays"
    again = serve(port=server.port)
    again.use(keys(4), keys(4), keys(4))
    browser.until("document.querySelector('#state').innerText === 'live'")
    hits = number(browser, "tokens", "hit in cpu", "lately")
    assert hits == 8, "the counters of the old one are forgotten"


def test_a_hidden_page_asks_nothing(browser, serve):
    server = serve()
    visit(browser, server)
    browser.until("document.querySelector('#state').innerText === 'live'")
    browser.evaluate(
        """(() => {
            Object.defineProperty(document, "hidden", { get: () => window.away, configurable: true });
            window.away = true;
            const later = setTimeout;
            window.planned = 0;
            window.setTimeout = (what, after) => {
                window.planned += after === INTERVAL;
                return later(what, after);
            };
            return loop();
        })()"""
    )
    assert browser.evaluate("window.planned") == 0, "a hidden page plans no poll"
    asked = len(server.asked)
    browser.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("window.planned > 0")
    assert len(server.asked) > asked


def test_the_page_needs_nothing_from_elsewhere(browser, serve):
    server = serve()
    visit(browser, server)
    browser.until("document.querySelector('[data-table=tiers] tr')")
    loaded = browser.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert all(name.startswith((server.url, "data:")) for name in loaded)
    assert {"/", "/api/view?minutes=5&columns=60"} == set(server.asked)
