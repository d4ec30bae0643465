"""Hooks of MkDocs: links out of docs/ are checked, README's table is shared, and what is too wide fits."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
_CONSOLE = re.compile(
    r'<div class="language-console highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL
)
_RULE = re.compile(r"-+(?:  -+)+</span>")  # below the head of a table
_PART = re.compile(r"<!-- README: (\w+) -->")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    def named(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (_ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_path} links to ../{path}, which is not there")
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, _PART.sub(_of_readme, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """A table that is too wide scrolls in its place; so does what a program printed in columns."""
    scrolling = '<div class="table" tabindex="0" role="region" aria-label="table"><table>'
    html = html.replace("<table>", scrolling).replace("</table>", "</table></div>")
    return _CONSOLE.sub(_in_lines, html)


def _in_lines(block: re.Match[str]) -> str:
    """An indented block, in the lines that the highlighter gives to a fenced one."""
    lines = "".join(f'<span class="line">{line}\n</span>' for line in block[1].rstrip("\n").split("\n"))
    kind = "columns" if _RULE.search(block[1]) else "console"
    return f'<div class="language-{kind} highlight"><pre><code>{lines}</code></pre></div>'


def _of_readme(name: re.Match[str]) -> str:
    """What README has between two marks, so that a figure stands in one place."""
    mark = name[1]
    found = re.search(
        rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", (_ROOT / "README.md").read_text(), re.DOTALL
    )
    if not found:
        raise PluginError(f"README.md has no part that is marked {mark}")
    return found[1].replace("](docs/", "](").replace("](#", "](../README.md#")
