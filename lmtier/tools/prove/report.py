"""The report of a proof: a table for a terminal, JSON, and one HTML file that shows what differed."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from math import inf
from typing import Any

from lmtier._version import __version__
from lmtier.tools.exits import Exit
from lmtier.tools.prove.proof import Proof, Stage
from lmtier.tools.terminal import number_text, printable, table

RIGHT, WRONG, UNPROVEN = Exit.DONE, Exit.NO, Exit.UNPROVEN
_SHOWN = 10
_HEADERS = ("what was done", "asked", "compared", "on reused KV", "tokens reused", "wrong", "")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #0a7d33; --bad: #c62828; --grey: #777 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .7rem;
border-bottom: 1px solid var(--line); vertical-align: top } td.n, th.n { text-align: right }
.good { color: var(--good) } .bad { color: var(--bad) } .grey { color: var(--grey) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .5rem; margin: .2rem 0 }
"""


def status(proof: Proof) -> Exit:
    """The exit code of the command; see `verdict`."""
    if proof.wrong:
        return WRONG
    is_right = proof.is_whole and proof.reusing and proof.noise.is_known and not proof.findings
    return RIGHT if is_right else UNPROVEN


def verdict(proof: Proof) -> str:
    compared = sum(stage.compared for stage in proof.stages)
    match status(proof):
        case Exit.DONE:
            return f"RIGHT: {compared} answers agree with their references, {proof.reusing} on reused KV."
        case Exit.NO:
            return f"WRONG: {len(proof.wrong)} findings in {compared} comparisons."
        case _ if not proof.is_whole:
            return f"NOT PROVEN: interrupted in stage {len(proof.stages)}, after {compared} comparisons."
        case _ if proof.findings:
            return f"NOT PROVEN: {len(proof.findings)} answers differ, perhaps by the engine's own rounding."
        case _ if proof.reusing:
            return "NOT PROVEN: the engine alone answers one prompt in two ways, so no answer could be wrong."
        case _:
            return f"NOT PROVEN: {compared} answers agree, but none of them reused any KV."


def confidence(proof: Proof) -> list[str]:
    """What the verdict rests on, and what it does not cover."""
    noise, lines = proof.noise, list[str]()
    if not noise.pairs:
        lines.append(
            "How far the engine alone moves log-probabilities was not measured; a difference below"
            f" {noise.limit:.2g} would not have been noticed."
        )
    elif noise.is_known:
        lines.append(
            f"The engine alone moves log-probabilities by {noise.largest:.2g} in {noise.pairs} pairs;"
            f" a difference below {noise.limit:.2g} would not have been noticed."
        )
    else:
        lines.append(
            "The engine alone answers one prompt in two ways, and does not say how near they are: no"
            " difference would have been noticed."
        )
    if proof.sensitivity == inf:
        lines.append("One changed early word makes another answer.")
    elif proof.sensitivity:
        lines.append(f"One changed early word moves an answer by {proof.sensitivity:.2g} at least.")
    asked, first, again = proof.needles
    if asked:
        lines.append(
            f"Of {asked} planted facts the engine finds {first} when it computes the prompt, and {again}"
            " when the prompt is restored."
        )
    if not proof.engine.offers_salts:
        lines.append("The engine has no salts, so a first answer is the only reference.")
    for stage in untested(proof):
        lines.append(f"Not tested: {stage.name}: {stage.note}.")
    return lines


def untested(proof: Proof) -> list[Stage]:
    return [stage for stage in proof.stages if not stage.is_tested]


def _cells(stage: Stage) -> tuple[str, ...]:
    note = stage.note if stage.is_tested else "not tested"
    return (
        *(stage.name, f"{stage.asked}", f"{stage.compared}", f"{stage.reusing}", f"{stage.reused:,}"),
        *(f"{len(stage.findings)}", note),
    )


def text(proof: Proof) -> str:
    engine = proof.engine
    lines = [f"{engine.url}, model {printable(engine.model.name)}", ""]
    lines += [table(_HEADERS, map(_cells, proof.stages)), ""]
    for finding in proof.findings[:_SHOWN]:
        moved = f" (moved by {number_text(finding.moved)})" if finding.moved else ""
        lines.append(f"{finding.stage}: {printable(finding.what)}{moved}")
        if finding.prompt:
            lines.append(f"    {printable(finding.prompt)}")
        if finding.wanted:
            lines += [f"    wanted  {printable(finding.wanted)}", f"    got     {printable(finding.got)}"]
    if hidden_count := len(proof.findings) - _SHOWN:
        lines += [f"    and {hidden_count} more: see --json or --html"] if hidden_count > 0 else []
    lines += ["", *confidence(proof), "", verdict(proof)]
    return "\n".join(lines)


def as_json(proof: Proof) -> dict[str, Any]:
    return {
        "lmtier": __version__,
        "url": proof.engine.url,
        "model": proof.engine.model.name,
        "status": {RIGHT: "right", WRONG: "wrong", UNPROVEN: "not proven"}[status(proof)],
        "noise": {
            "largest": _finite(proof.noise.largest),
            "limit": _finite(proof.noise.limit),
            "pairs": proof.noise.pairs,
        },
        "sensitivity": _finite(proof.sensitivity),
        "needles": dict(zip(("asked", "found", "found restored"), proof.needles, strict=True)),
        "tokens_per_second": proof.throughput,
        "confidence": confidence(proof),
        "stages": [_finite(asdict(stage)) for stage in proof.stages],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: null means a difference that cannot be measured."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if value == inf else value


def html(proof: Proof) -> str:
    good = {RIGHT: "good", WRONG: "bad"}.get(status(proof), "grey")
    rows = "\n".join(_row(stage) for stage in proof.stages)
    header_cells = "".join(
        f'<th class="{"n" if 0 < place < 6 else ""}">{escape(head)}</th>'
        for place, head in enumerate(_HEADERS)
    )
    finding_blocks = "\n".join(
        f"<h3>{escape(finding.stage)}: {escape(finding.what)}</h3><p class=grey>{escape(finding.prompt)}</p>"
        + (
            f"<p>Moved by {number_text(finding.moved)}.</p><pre>wanted  {escape(finding.wanted)}\n"
            f"got     {escape(finding.got)}</pre>"
            if finding.wanted
            else ""
        )
        for finding in proof.findings
    )
    confidence_items = "".join(f"<li>{escape(line)}</li>" for line in confidence(proof))
    return f"""<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>Proof of {escape(proof.engine.model.name)}</title><style>{_STYLE}</style>
<h1 class={good}>{escape(verdict(proof))}</h1>
<p>{escape(proof.engine.url)}, model <b>{escape(proof.engine.model.name)}</b>, lmtier {__version__}</p>
<table><tr>{header_cells}</tr>
{rows}
</table>
<h2>What this rests on</h2><ul>{confidence_items}</ul>
{"<h2>What differed</h2>" if finding_blocks else ""}{finding_blocks}
</html>
"""


def _row(stage: Stage) -> str:
    colour = "grey" if not stage.is_tested else "bad" if stage.findings else "good"
    name, *numbers, note = _cells(stage)
    cells = "".join(f"<td class=n>{each}</td>" for each in numbers)
    return f"<tr><td class={colour}>{escape(name)}</td>{cells}<td>{escape(note)}</td></tr>"
