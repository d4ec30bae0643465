"""Numbers as people read them, in every sentence and table."""

from __future__ import annotations

from collections.abc import Sequence


def amount(number: float) -> str:
    """Short, as the page writes it: 9,999, 12.3K, 1.23M."""
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    value, unit = number / 1000, "K"
    for larger in ("M", "B", "T"):
        if abs(value) >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.3g}{unit}"


def plural(number: int, word: str) -> str:
    return f"{amount(number)} {word}{'s' * (number != 1)}"


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    value = 100 * share
    fine = 0 < value < 9.95 or 99 < value < 100
    return "< 0.1 %" if 0 < value < 0.1 else f"{value:.1f} %" if fine else f"{value:.0f} %"


def seconds_text(seconds: float) -> str:
    """A short time: 3.1 ms, 1.5 s."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"


def duration_text(seconds: float) -> str:
    """In the two largest units: 12 s, 3 min 20 s, 4 h 5 min, 9 d 2 h."""
    total = int(seconds)
    units = ((total // 86400, "d"), (total // 3600 % 24, "h"), (total // 60 % 60, "min"), (total % 60, "s"))
    largest = next((i for i, (count, _) in enumerate(units) if count), len(units) - 1)
    first, *second = units[largest : largest + 2]
    return " ".join(f"{count} {unit}" for count, unit in (first, *second) if count or unit == first[1])


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
