"""A hook of mkdocs: what docs/ links to elsewhere in the repository must exist, and is named instead."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    def named(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (_ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_path} links to ../{path}, which is not there")
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
