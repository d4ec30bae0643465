"""Reads the XML that a server sends, as rows of text, within bounds of size, depth and time."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias
from xml.parsers import expat

from lmtier_backends.sockets import BadReply, seconds_left

_PIECE = 16 << 10  # for one call of the parser, which holds the GIL
_TOKEN = 64 << 10  # the parser scans an unfinished tag again with each piece
_TEXT = 8 << 10
_DEPTH = 16
_ROWS = 1000  # S3 lists no more in a page
_ELEMENTS = 32 * _ROWS
_NUMBER = re.compile("[0-9]{1,18}")

Fields: TypeAlias = "dict[str, str]"
"""Text of elements without children, by path."""


class Document(NamedTuple):
    root: str
    fields: Fields
    """Outside of rows, by path below the root."""
    rows: list[Fields]
    """By path below the row."""


def parse_xml(body: bytes, row: str, until: float) -> Document:
    """`row`: the element that is repeated, wherever it is. Raises OSError."""
    reader = _Reader(row)
    parser = expat.ParserCreate("utf-8")  # whatever encoding the document names
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        for at in range(0, len(body), _PIECE):
            seconds_left(until)
            parser.Parse(body[at : at + _PIECE], False)
            if at - parser.CurrentByteIndex > _TOKEN:
                raise BadReply(f"XML with a tag of more than {_TOKEN} bytes")
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise BadReply(f"not XML: {error}") from None
    return Document(reader.root, reader.fields, reader.rows)


def number_in(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


class _Reader:
    def __init__(self, row: str) -> None:
        self._row = row
        self._path: list[str] = []
        self._row_at = 0
        """How deep the row is that has begun; 0: none has."""
        self._elements = 0
        self._pieces: list[str] = []
        self._length = 0
        self._is_leaf = False
        self.root = ""
        self.fields: Fields = {}
        self.rows: list[Fields] = []

    def doctype(self, *_: object) -> None:
        raise BadReply("XML that defines a type: its entities could grow without end")

    def start(self, name: str, attributes: object) -> None:
        self._elements += 1
        self._path.append(name)
        if self._elements > _ELEMENTS or len(self._path) > _DEPTH:
            raise BadReply(f"XML of more than {_ELEMENTS} elements, or {_DEPTH} levels")
        self.root = self.root or name
        if name == self._row and not self._row_at:
            if len(self.rows) == _ROWS:
                raise BadReply(f"XML of more than {_ROWS} times {name}")
            self._row_at = len(self._path)
            self.rows.append({})
        self._pieces, self._length, self._is_leaf = [], 0, True

    def text(self, text: str) -> None:
        self._length += len(text)
        if self._length > _TEXT:
            raise BadReply(f"XML with a text of more than {_TEXT} letters")
        self._pieces.append(text)

    def end(self, name: str) -> None:
        if self._is_leaf:
            fields = self.rows[-1] if self._row_at else self.fields
            path = "/".join(self._path[self._row_at or 1 :])
            fields.setdefault(path, "".join(self._pieces).strip())
        if len(self._path) == self._row_at:
            self._row_at = 0
        self._path.pop()
        self._pieces, self._length, self._is_leaf = [], 0, False
