"""The site in a real browser: each page fits its screen, can be read in light and dark, and loses no link."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import Browser
from tests.test_docs import ROOT, build

DOCS = ROOT / "docs"
PHONE, DESK = 390, 1280

# What makes a page scroll sideways.
WIDE = """[...document.querySelectorAll("body *")].filter(each =>
    document.scrollingElement.scrollWidth > WIDTH && each.getBoundingClientRect().right > WIDTH
).map(each => each.outerHTML.slice(0, 120))"""

# A command that is cut off, or needs scrolling.
CUT = """[...document.querySelectorAll(":is(.language-sh, .language-console) pre")]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent.slice(0, 120))"""

# Texts whose contrast with what is behind them is less than WCAG's AA wants: 4.5, or 3 for large ones.
FAINT = """(() => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const linear = v => v <= 10.31475 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
        const [x, y, z] = [r, g, b].map(linear);
        return .2126 * x + .7152 * y + .0722 * z;
    };
    const behind = each => {
        for (; each; each = each.parentElement) {
            const colour = parts(getComputedStyle(each).backgroundColor);
            if (colour.length < 4 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const place = each => each && each !== document.body
        ? `${place(each.parentElement)} ${each.tagName}.${each.className}` : "";
    const found = new Set(), looked = new Set();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const each = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(each.tagName)) continue;
        const where = place(each);
        if (looked.has(where)) continue;
        looked.add(where);
        const style = getComputedStyle(each);
        const [one, other] = [light(parts(style.color)), light(behind(each))].sort((a, b) => b - a);
        const ratio = (one + .05) / (other + .05);
        const size = parseFloat(style.fontSize);
        const is_large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (is_large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${where}`);
    }
    return [...found];
})()"""


class Visit(NamedTuple):
    """What was seen of one page."""

    wide: list[str]
    cut: list[str]
    faint: list[str]
    links: list[str]
    names: set[str]
    complaints: list[str]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT / "mkdocs.yml", folder)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def visits(site: Path, address: str, browser: Browser) -> dict[str, Visit]:
    """Each page is opened once; then its screen and its colours change."""
    seen: dict[str, Visit] = {}
    for file in sorted(site.rglob("index.html")):
        path = "".join(f"{part}/" for part in file.parent.relative_to(site).parts)
        browser.complaints.clear()
        browser.open(address + path, width=PHONE)
        wide, cut = browser.evaluate(WIDE.replace("WIDTH", str(PHONE))), browser.evaluate(CUT)
        faint = browser.evaluate(FAINT)
        browser.dark(True)
        faint += browser.evaluate(FAINT)
        browser.resize(DESK, 900)
        wide += browser.evaluate(WIDE.replace("WIDTH", str(DESK)))
        links = browser.evaluate("[...document.links].map(each => each.href)")
        names = set(browser.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)"))
        seen[path] = Visit(wide, cut, faint, links, names, list(browser.complaints))
    assert len(seen) > 40
    return seen


def test_every_page_is_built(site):
    pages = {each.parent.name for each in site.rglob("index.html")}
    assert pages >= {each.stem for each in DOCS.glob("*.md")} - {"index"}


def test_the_first_page_has_the_comparison_of_the_readme(site):
    page = (site / "index.html").read_text()
    assert "<strong>80 ms</strong>" in page
    assert "README:" not in page


def test_no_page_is_wider_than_a_phone_or_a_desk(visits):
    assert {path: each.wide for path, each in visits.items() if each.wide} == {}


def test_a_long_command_wraps_on_a_phone(visits):
    assert {path: each.cut for path, each in visits.items() if each.cut} == {}


def test_all_text_stands_out_in_light_and_in_dark(visits):
    assert {path: each.faint for path, each in visits.items() if each.faint} == {}


def test_no_page_complains_or_misses_a_file(visits):
    assert {path: each.complaints for path, each in visits.items() if each.complaints} == {}


def test_links_within_the_site_lead_somewhere(site, address, visits):
    inside = [
        (path, urlsplit(link.removeprefix(address)))
        for path, each in visits.items()
        for link in each.links
        if link.startswith(address)
    ]
    assert len(inside) > 1000
    lost = {
        (path, link.geturl())
        for path, link in inside
        if (link.path not in visits and not (site / link.path).is_file())
        or (link.fragment and unquote(link.fragment) not in visits[link.path].names)
    }
    assert lost == set()


def test_search_finds_the_page_on_breakers(address, browser):
    browser.open(address, width=DESK)
    browser.evaluate("document.getElementById('query').focus()")
    browser.call("Input.insertText", text="LmtierBreakerOpen")
    found = browser.until("[...document.querySelectorAll('#results a')].map(each => each.href).join(' ')")
    assert f"{address}ALERTS/#lmtierbreakeropen" in found


def test_a_reader_chooses_light_or_dark_and_it_stays(address, browser):
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(address, width=DESK)
    light = browser.evaluate(paper)
    browser.evaluate("document.getElementById('theme').click()")
    dark = browser.evaluate(paper)
    assert dark != light
    browser.open(f"{address}SERVER/", width=DESK)
    assert browser.evaluate(paper) == dark
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(paper) == light


def test_the_button_copies_commands_alone(address, browser):
    """A selection is copied as it stands."""
    browser.open(f"{address}REDIS/", width=PHONE)
    copied = browser.evaluate(
        """new Promise(resolve => {
            navigator.clipboard.writeText = resolve;
            document.querySelector(".language-columns .copy").click();
        })"""
    )
    assert copied == "lmtier serve --tier 'cpu://?capacity=64MiB' --tier 'redis://127.0.0.1/0?ttl=7d'"
    selected = browser.evaluate(
        """(() => {
            getSelection().selectAllChildren(document.querySelector(".language-columns code"));
            return getSelection().toString();
        })()"""
    )
    page = (DOCS / "REDIS.md").read_text()
    assert textwrap.indent(selected.rstrip(), "    ") in page


def test_a_page_opens_at_its_top_and_the_menu_where_it_is(address, browser):
    browser.open(f"{address}LOG/", width=DESK, height=600)
    assert browser.evaluate("scrollY") == 0
    place = browser.evaluate("document.querySelector('#menu [aria-current]').getBoundingClientRect().bottom")
    assert 0 < place < 600


def test_the_menu_opens_on_a_phone(address, browser):
    browser.open(address, width=PHONE)
    is_shown = "document.getElementById('menu').checkVisibility()"
    assert not browser.evaluate(is_shown)
    browser.evaluate("document.getElementById('open-menu').click()")
    assert browser.evaluate(is_shown)
