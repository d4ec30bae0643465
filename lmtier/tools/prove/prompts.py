"""Makes prompts: random, of a wanted length, with facts planted early, midway and late; and small images.

Text where the engine has a tokenizer. Token ids otherwise, or where words are not enough to move its answers.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from lmtier.tools.prove.endpoint import Prompt

_WORDS = """\
old quiet green heavy small bright cold narrow deep early plain round sharp slow soft tall warm wide
bridge garden river clock window market letter winter engine harbour mirror ladder forest candle teacher
carries follows watches repairs remembers crosses measures paints borrows counts leaves finds
north south east west upper lower inner outer"""
_ADJECTIVES, _NOUNS, _VERBS, _PLACES = (line.split() for line in _WORDS.splitlines())
_IDS = range(10, 1000)
"""Ids that nearly every vocabulary has, and that mean something ordinary there."""
_TOKENS_A_WORD = 1.3


@dataclass(frozen=True, slots=True)
class PlantedPrompt:
    """A prompt, and the code that its last sentence asks for; empty: it asks for none."""

    prompt: Prompt
    code: str = ""


class PromptWriter:
    """Writes prompts in text or in token ids. No two runs and no two prompts have a beginning in common."""

    def __init__(self, seed: int, *, writes_text: bool) -> None:
        self._dice = random.Random(seed)
        self.writes_text = writes_text

    def prompt(self, tokens: int, asks_for: int = 0) -> PlantedPrompt:
        """`asks_for`: the fact planted early (0), midway (1) or late (2)."""
        if not self.writes_text:
            return PlantedPrompt(tuple(self._dice.choices(_IDS, k=tokens)))
        words = int(tokens / _TOKENS_A_WORD)
        gates = self._dice.sample(_PLACES, 3)
        codes = [str(self._dice.randrange(10_000, 99_999)) for _ in gates]
        parts = [f"Report {self._dice.getrandbits(48)}."]
        planted = [words // 10, words // 2, 9 * words // 10]
        count = 2
        while count < words:
            while planted and count >= planted[0]:
                gate, code = gates[3 - len(planted)], codes[3 - len(planted)]
                parts.append(f"The code of the {gate} gate is {code}.")
                planted.pop(0)
                count += 12
            parts.append(self._sentence())
            count += 7
        parts.append(f"Question: what is the code of the {gates[asks_for]} gate?")
        parts.append(f"Answer: the code of the {gates[asks_for]} gate is")
        return PlantedPrompt(" ".join(parts), codes[asks_for])

    def _sentence(self) -> str:
        choose = self._dice.choice
        return (
            f"The {choose(_ADJECTIVES)} {choose(_NOUNS)} {choose(_VERBS)} the {choose(_ADJECTIVES)}"
            f" {choose(_NOUNS)}."
        )

    def with_one_change(self, planted: PlantedPrompt, at: float) -> Prompt:
        """The same prompt with one word or token changed, so far from its beginning (0 to 1)."""
        parts = _split(planted.prompt)
        index = max(2, int(at * len(parts)))
        replacement = "nineteen" if isinstance(planted.prompt, str) else (int(parts[index]) + 7) % 900 + 10
        return _joined(planted.prompt, [*parts[:index], replacement, *parts[index + 1 :]])

    def diverging_after(self, planted: PlantedPrompt, after: int) -> Prompt:
        """A prompt of the same length that has the first `after` words or tokens of it, and then others."""
        parts = _split(planted.prompt)
        tail = _split(self.prompt(2 * len(parts)).prompt)[2 : 2 + len(parts) - after]
        return _joined(planted.prompt, [*parts[:after], *tail])


def _split(prompt: Prompt) -> list[str] | list[int]:
    return prompt.split(" ") if isinstance(prompt, str) else list(prompt)


def _joined(like: Prompt, parts: Sequence[str | int]) -> Prompt:
    return " ".join(map(str, parts)) if isinstance(like, str) else tuple(int(each) for each in parts)


def length(prompt: Prompt) -> int:
    """In words or tokens."""
    return len(_split(prompt))


def image(number: int, side: int = 56) -> bytes:
    """A PNG of sixteen coloured squares; another number, other colours."""
    dice = random.Random(number)
    colours = [[dice.randbytes(3) for _ in range(4)] for _ in range(4)]
    rows = b"".join(
        b"\0" + b"".join(colours[4 * y // side][4 * x // side] for x in range(side)) for y in range(side)
    )

    def piece(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + piece(b"IHDR", header)
        + piece(b"IDAT", zlib.compress(rows))
        + piece(b"IEND", b"")
    )
