"""Compares several configurations: makes the variants, a table of their results, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from lmtier.config import TierSpec
from lmtier.errors import ConfigError
from lmtier.rules.lifetimes import FOREVER
from lmtier.rules.money import HOUR, GpuSavings, next_gib
from lmtier.tools.sim.replay import Hardware, ReplayResult
from lmtier.tools.sim.traces import Trace
from lmtier.tools.terminal import number_text, size_text, table

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def variants(urls: Sequence[str], policies: str = "", writes: str = "") -> list[list[str]]:
    """One list of tiers for each variant. Each comma in an option of a URL separates variants.

    `policies` and `writes`, also with commas, are set in all tiers where they have a meaning.
    """
    choices: list[list[str]] = []
    for url in urls:
        head, separator, query = url.partition("?")
        options = [option.partition("=") for option in query.split("&") if option]
        each = [[f"{name}{equals}{value}" for value in text.split(",")] for name, equals, text in options]
        choices.append([f"{head}{separator}{'&'.join(chosen)}" for chosen in product(*each)])
    for_all = [_words("policy", policies), _words("write", writes)]
    return [
        [_with(url, policy, "" if url.startswith(("cpu:", "gpu:")) else write) for url in chosen]
        for *chosen, policy, write in product(*choices, *for_all)
    ]


def _words(name: str, text: str) -> list[str]:
    return [f"{name}={word}" for word in text.split(",")] if text else [""]


def _with(url: str, *options: str) -> str:
    head, _, query = url.partition("?")
    names = {option.partition("=")[0] for option in options if option}
    kept = [option for option in query.split("&") if option and option.partition("=")[0] not in names]
    return f"{head}?{'&'.join([*kept, *filter(None, options)])}"


def described(specs: Sequence[TierSpec]) -> str:
    return " + ".join(f"{spec.scheme} {_room(spec)} {_rules(spec)}" for spec in specs)


def _room(spec: TierSpec) -> str:
    return "unlimited" if spec.capacity is None else size_text(spec.capacity)


def _rules(spec: TierSpec) -> str:
    ttl = "" if spec.ttl == FOREVER else f" ttl {spec.ttl:g}s"
    if spec.scheme in ("gpu", "cpu"):
        return f"{spec.policy}{ttl}"
    budget = "" if spec.writes_per_day is None else f" {size_text(spec.writes_per_day)}/day"
    return f"{spec.policy} {spec.write}{budget}{ttl}"


def summary(
    trace: Trace, chunk_tokens: int, bytes_per_token: float, hardware: Hardware, *, has_codec: bool = False
) -> str:
    """`has_codec`: a tier has one, which has no effect here."""
    return (
        f"{trace.name}: {len(trace.requests):,} requests in {trace.seconds / 3600:.3g} h,"
        f" {trace.tokens:,} tokens of prompts\n"
        f"{chunk_tokens} tokens a chunk, {size_text(round(bytes_per_token))} a token;"
        f" an engine that computes {hardware.prefill:,.0f} tokens a second"
        + "\na trace has no bytes to encode: every chunk has its full size, whatever codec= says"
        * has_codec
    )


def report(outcomes: Sequence[ReplayResult]) -> str:
    """A row for each configuration."""
    labels = list(dict.fromkeys(label for outcome in outcomes for label in outcome.hits))
    lower = [label for label in labels if any(label in outcome.written for outcome in outcomes)]
    has_hints = {outcome.hinted for outcome in outcomes} != {"trace"}
    headers = [
        "tiers",
        *(["hints"] if has_hints else []),
        "hit %",
        *(["bound %"] if any(outcome.bound is not None for outcome in outcomes) else []),
        *(f"{label} %" for label in labels if len(labels) > 1),
        "tokens saved",
    ]
    for label in lower:
        headers += [f"{label} read", f"{label} written", f"{label} written/day"]
    headers += ["TTFT p50 ms", "p95", "p99"]
    has_bound = "bound %" in headers
    return table(headers, ([*_row(outcome, labels, lower, has_hints, has_bound)] for outcome in outcomes))


def comparison_text(outcomes: Sequence[ReplayResult], hardware: Hardware, price: float) -> str:
    """What hints are worth, and with a price what hits save; empty if there is nothing to compare."""
    parts = []
    if len({outcome.hinted for outcome in outcomes}) > 1:
        by_tiers: dict[str, dict[str, float]] = {}
        for outcome in outcomes:
            by_tiers.setdefault(described(outcome.specs), {})[outcome.hinted] = outcome.hit_ratio
        names = list(dict.fromkeys(outcome.hinted for outcome in outcomes))
        rows = [
            (
                tiers,
                f"{100 * ratios[names[0]]:.2f}",
                *(f"{100 * (ratios[n] - ratios[names[0]]):+.2f}" for n in names[1:]),
            )
            for tiers, ratios in by_tiers.items()
        ]
        parts.append(table(("what hints are worth", f"{names[0]}, hit %", *names[1:]), rows))
    if price:
        rows = []
        for outcome in outcomes:
            saved_cost = saved(outcome, hardware, price)
            more = next_gib_of(outcome, outcomes, hardware, price)
            rows.append(
                (
                    described(outcome.specs) + (f", {outcome.hinted}" if outcome.hinted != "trace" else ""),
                    number_text(saved_cost.gpu_hours),
                    f"{saved_cost.money:,.2f}",
                    "-" if more is None else f"{more.money:,.2f}",
                )
            )
        headers = ("what hits save", "GPU-hours", f"at {price:g} an hour", "the next GiB, a day")
        parts.append(table(headers, rows))
    return "\n\n".join(parts)


def saved(outcome: ReplayResult, hardware: Hardware, price: float) -> GpuSavings:
    return GpuSavings(outcome.tokens_not_computed / hardware.prefill / HOUR, price)


def next_gib_of(
    outcome: ReplayResult, outcomes: Sequence[ReplayResult], hardware: Hardware, price: float
) -> GpuSavings | None:
    """What one more GiB saves in a day, by the next larger variant of the same rules; None: there is none."""
    larger = [candidate for candidate in outcomes if _is_larger(candidate, outcome)]
    if not larger or not outcome.seconds:
        return None
    next_larger = min(larger, key=_capacity)
    return next_gib(
        *(outcome.hit_ratio, next_larger.hit_ratio, _capacity(next_larger) - _capacity(outcome)),
        asked=outcome.tokens,
        seconds=outcome.seconds,
        token=1 / hardware.prefill,
        price=price,
    )


def _is_larger(candidate: ReplayResult, base: ReplayResult) -> bool:
    """Whether they differ in the capacity of a single tier, and in nothing else."""
    if candidate.hinted != base.hinted or _names(candidate.specs) != _names(base.specs):
        return False
    pairs = [(a.capacity, b.capacity) for a, b in zip(candidate.specs, base.specs, strict=True)]
    differing = [(a, b) for a, b in pairs if a != b]
    return len(differing) == 1 and all(a is not None and b is not None and a > b for a, b in differing)


def _names(specs: Sequence[TierSpec]) -> list[tuple[str, str]]:
    return [(spec.scheme, _rules(spec)) for spec in specs]


def _capacity(outcome: ReplayResult) -> int:
    return sum(spec.capacity or 0 for spec in outcome.specs)


def _row(
    outcome: ReplayResult, labels: Sequence[str], lower: Sequence[str], has_hints: bool, has_bound: bool
) -> Iterator[str]:
    yield described(outcome.specs)
    if has_hints:
        yield outcome.hinted
    yield f"{100 * outcome.hit_ratio:.2f}"
    if has_bound:
        yield "-" if outcome.bound is None else f"{100 * outcome.bound:.2f}"
    for label in labels if len(labels) > 1 else ():
        yield f"{100 * outcome.hits.get(label, 0) / max(1, outcome.tokens):.2f}"
    yield f"{outcome.tokens_not_computed:,}"
    for label in lower:
        if label in outcome.written:
            yield from (size_text(outcome.read[label]), size_text(outcome.written[label]))
            yield size_text(round(outcome.written_per_day(label)))
        else:
            yield from "---"
    yield from (number_text(1e3 * outcome.percentile(share)) for share in (0.5, 0.95, 0.99))


def as_json(outcome: ReplayResult, hardware: Hardware, price: float = 0.0) -> dict[str, Any]:
    worth = saved(outcome, hardware, price)
    return {
        "hints": {"which": outcome.hinted, "executed": outcome.executed},
        "saved": {"gpu_hours": worth.gpu_hours, "money": worth.money},
        "tiers": [
            {
                "scheme": s.scheme,
                "capacity": s.capacity,
                "policy": s.policy,
                "ttl": None if s.ttl == FOREVER else s.ttl,
                "write": s.write,
                "writes_per_day": s.writes_per_day,
            }
            for s in outcome.specs
        ],
        "requests": outcome.requests,
        "chunks": outcome.chunks,
        "tokens": outcome.tokens,
        "hit_ratio": outcome.hit_ratio,
        "bound": outcome.bound,
        "hit_tokens": outcome.hits,
        "saved_tokens": outcome.saved,
        "read_bytes": outcome.read,
        "written_bytes": outcome.written,
        "written_bytes_per_day": {label: outcome.written_per_day(label) for label in outcome.written},
        "ttft_seconds": {f"p{share}": outcome.percentile(share / 100) for share in (50, 90, 95, 99)},
    }


# ---- the plot


class PlotLine(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """Capacity in GiB, share of the tokens."""


def curves(outcomes: Iterable[ReplayResult]) -> list[PlotLine]:
    """Hits over the capacity of all tiers, with a curve for each variant of rules."""
    points: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        name = " + ".join(f"{spec.scheme} {_rules(spec)}" for spec in outcome.specs)
        if outcome.hinted != "trace":
            name += f", hints: {outcome.hinted}"
        capacity = sum(spec.capacity or 0 for spec in outcome.specs) / (1 << 30)
        points.setdefault(name, []).append((capacity, outcome.hit_ratio))
    return [PlotLine(name, sorted(each)) for name, each in points.items()]


def check_plot(path: Path) -> None:
    """Check the file name of a plot before the work begins."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: name a .svg file, or a .png")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: a PNG needs matplotlib; a .svg file needs nothing")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such folder")


def plot(path: Path, title: str, found: Sequence[PlotLine]) -> None:
    """Draw it into an SVG file, or with matplotlib into a PNG."""
    try:
        if path.suffix == ".svg":
            path.write_text(svg(title, found))
        else:
            _png(path, title, found)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from None


def svg(title: str, found: Sequence[PlotLine]) -> str:
    """Self-contained, readable on white and on black."""
    width, height, left, top, right, bottom = 760, 440, 60, 48, 20, 52
    sizes = sorted({capacity for curve in found for capacity, _ in curve.points})
    low, high = log2(sizes[0]) - 0.2, log2(sizes[-1]) + 0.2
    highest_share = max(0.05, *(share for curve in found for _, share in curve.points))
    step = next(each for each in (0.01, 0.02, 0.05, 0.1, 0.2) if highest_share / each <= 6)
    ceiling = step * (int(highest_share / step) + 1)

    def x(capacity: float) -> float:
        return left + (log2(capacity) - low) / (high - low) * (width - left - right)

    def y(share: float) -> float:
        return height - bottom - share / ceiling * (height - top - bottom)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" {more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 18 * len(found)}"'
        ' font-family="sans-serif" font-size="12" fill="#777">',
        text(left, 24, title, 'font-size="14"'),
    ]
    for i in range(round(ceiling / step) + 1):
        at = y(i * step)
        parts.append(f'<path d="M{left} {at:.1f}H{width - right}" stroke="#777" stroke-opacity=".3"/>')
        parts.append(text(left - 8, at + 4, f"{100 * i * step:.0f} %", 'text-anchor="end"'))
    for capacity in sizes:
        words = size_text(round(capacity * (1 << 30)))
        parts.append(text(x(capacity), height - bottom + 20, words, 'text-anchor="middle"'))
    parts.append(text((left + width - right) / 2, height - 10, "capacity", 'text-anchor="middle"'))
    for i, (name, points) in enumerate(found):
        colour = _COLOURS[i % len(_COLOURS)]
        line = " ".join(f"{x(capacity):.1f},{y(share):.1f}" for capacity, share in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for capacity, share in points:
            parts.append(f'<circle cx="{x(capacity):.1f}" cy="{y(share):.1f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<rect x="{left}" y="{height + 18 * i}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(left + 20, height + 18 * i + 11, name))
    return "\n".join([*parts, "</svg>\n"])


def _png(path: Path, title: str, found: Sequence[PlotLine]) -> None:
    figures: Any = import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in found:
        axes.plot([capacity for capacity, _ in points], [100 * s for _, s in points], "o-", label=name)
    axes.set(title=title, xlabel="capacity, GiB", ylabel="tokens hit, %", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
