"""Checks the prose of pages: short lines and sentences, common words, and a start with something to run.

In code it checks the docstrings, comments and messages: the same words, and the sentences of docstrings.

python docs/prose.py [FILE …]     all pages, the README and the code, if no file is named
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE, SENTENCE = 110, 32
# A word, and what to write instead.
WORDS = {
    "told": "say who sets or passes it",
    "nobody": "say who does not",
    "anybody": "say who",
    "somebody": "say who",
    "whoever": "say who",
    "what is there": "name it",
    "what there is": "name it",
    "of its own": "own, or separate",
    "for good": "permanently",
    "by hand": "manually, or leave it out",
    "as it were": "leave it out",
    "thereof": "of it",
    "hitherto": "until now",
    "whence": "from where",
    "heretofore": "until now",
    "utilize": "use",
    "leverage": "use",
    "in order to": "to",
    "simply": "leave it out",
    "obviously": "leave it out",
    "seamless": "leave it out",
    "blazing": "give a figure",
}
_WORD = re.compile(rf"\b({'|'.join(map(re.escape, WORDS))})\b", re.IGNORECASE)
_NO_NOUN = re.compile(r"(Of|Those) (?!which)")
# These tell what happened, or are made by a program: their sentences may be long.
RECORDS = {"LOG.md"}
NO_COMMAND = {"LOG.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"}
CODE = ("lmtier", "backends", "integrations", "examples")


def pages() -> list[Path]:
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    code = [path for path in files if path.name != "demo.py"]  # which has a story
    page = ROOT / "lmtier" / "server" / "page.html"
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *code, page]


def complaints(path: Path) -> Iterator[str]:
    if path.suffix == ".py":
        yield from _in_code(path.read_text())
    elif path.suffix == ".html":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield from _words(line, number)
    else:
        yield from _in_page(path)


def _in_code(source: str) -> Iterator[str]:
    texts = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in texts:
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield from _words(line, number)
    for node in ast.walk(ast.parse(source)):  # a string that stands alone is a docstring
        if isinstance(node, ast.Expr) and isinstance(value := node.value, ast.Constant):
            if found := _NO_NOUN.match(str(value.value)):
                yield f"{value.lineno}: {found[0]!r} begins a docstring: begin with what it is"
            for paragraph in re.split(r"\n\s*\n", str(value.value)):
                if not re.search(r"\S {3}|^ {4}", paragraph):  # no table, and no example
                    yield from _long([paragraph], value.lineno, "")


def _words(line: str, number: int) -> Iterator[str]:
    for found in _WORD.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
        yield f"{number}: {found!r}: {WORDS[found.lower()]}"


def _in_page(path: Path) -> Iterator[str]:
    lines = path.read_text().splitlines()
    fenced, paragraph, start = False, list[str](), 0
    for number, line in enumerate([*lines, ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        table = line.lstrip().startswith("|")
        if len(line) > LINE and not table:
            yield f"{number}: {len(line)} characters, at most {LINE}"
        quoted = fenced or fence or line.startswith("    ")
        if not quoted:
            yield from _words(line, number)
        if quoted or table or not line.strip() or re.match(r"\s*([-*#>]|\d+\.)\s?", line):
            yield from _long(paragraph, start, path.name)
            paragraph = []
        if not (quoted or table) and line.strip():
            start = start if paragraph else number
            paragraph.append(line)
    if path.name not in NO_COMMAND and not _starts_with_a_command(lines):
        yield "1: no command or code to copy before the first table or the second heading"


def _long(paragraph: list[str], start: int, page: str) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "x", " ".join(paragraph))
    for sentence in re.split(r"(?<=[.:;!?])\s", text):
        words = len(sentence.split())
        if words > SENTENCE and page not in RECORDS:
            yield f"{start}: a sentence of {words} words, at most {SENTENCE}: {sentence[:60]}…"


def _starts_with_a_command(lines: list[str]) -> bool:
    for line in lines[1:]:
        if line.startswith(("```", "    ")):
            return True
        if line.startswith(("|", "## ")):
            return False
    return False


def main() -> int:
    named = [Path(each) for each in sys.argv[1:]] or pages()
    found = [f"{path}:{each}" for path in named for each in complaints(path)]
    sys.stdout.write("".join(f"{each}\n" for each in found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
