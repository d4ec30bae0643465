"""Writes what is derived: Grafana's dashboards, and docs/METRICS.md.

    python dashboards/build.py

Plain dicts, because a panel is ten lines of them; a test reads them with the types of Grafana's SDK.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmtier.observe.metrics import DROP_REASONS, LABELS, MISS_REASONS, Metrics

ROOT = Path(__file__).parents[1]
Panel = dict[str, Any]
Steps = list[dict[str, Any]]
Query = tuple[str, str]
"""PromQL, and its legend."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
_HEIGHT = 8
_GREEN_RED: Steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
_RED_GREEN: Steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]


# ---- panels


def panel(
    title: str,
    *queries: Query,
    unit: str = "short",
    text: str = "",
    kind: str = "timeseries",
    stack: bool = False,
    width: int = 8,
    top: float | None = None,
    steps: Steps | None = None,
    instant: bool = False,
) -> Panel:
    defaults: dict[str, Any] = {"unit": unit, "min": 0}
    if top is not None:
        defaults["max"] = top
    if steps:
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    options: dict[str, Any] = {}
    if kind == "timeseries":
        drawn = {"fillOpacity": 40 if stack else 10, "lineWidth": 1, "showPoints": "never"}
        defaults["custom"] = {**drawn, "stacking": {"mode": "normal" if stack else "none", "group": "A"}}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif kind in ("stat", "bargauge"):
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "auto",
        }
        options |= (
            {"colorMode": "background" if steps else "value", "graphMode": "none"} if kind == "stat" else {}
        )
    return {
        "title": title,
        "description": text,
        "type": kind,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
            }
            for i, (expr, legend) in enumerate(queries)
        ],
        "gridPos": {"w": width, "h": 4 if kind == "stat" else _HEIGHT},
    }


def row(title: str) -> Panel:
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": _WIDTH, "h": 1}}


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard(
    uid: str, title: str, variables: Sequence[dict[str, Any]], panels: Iterable[Panel]
) -> dict[str, Any]:
    """Panels from left to right, and on to the next line when one is full."""
    placed: list[Panel] = []
    x = y = tallest = 0
    for number, each in enumerate(panels, 1):
        grid = each["gridPos"]
        if x + grid["w"] > _WIDTH:
            x, y, tallest = 0, y + tallest, 0
        placed.append({**each, "id": number, "gridPos": {**grid, "x": x, "y": y}})
        x, tallest = x + grid["w"], max(tallest, grid["h"])
    source = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    return {
        "uid": uid,
        "title": title,
        "tags": ["lmtier"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "tags": ["lmtier"],
                "title": "lmtier",
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": placed,
    }


# ---- queries


def rate(metric: str, by: str = "", extra: str = "") -> str:
    return summed(f"rate({selected(metric, extra)}[$__rate_interval])", by)


def summed(expr: str, by: str = "") -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"


def selected(metric: str, extra: str = "") -> str:
    return f'{metric}{{instance=~"$instance"{extra}}}'


def gauge(metric: str, by: str = "", extra: str = "", how: str = "sum") -> str:
    """Of a gauge."""
    return f"{how} by ({by}) ({selected(metric, extra)})" if by else f"{how}({selected(metric, extra)})"


def rate_of_tiers(metric: str, by: str, extra: str = "") -> str:
    return rate(metric, by, _TIER + extra)


def quantile(share: float, metric: str, by: str = "", extra: str = "") -> str:
    buckets = rate(f"{metric}_bucket", f"{by}, le" if by else "le", extra)
    return f"histogram_quantile({share}, {buckets})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


# ---- dashboards

INSTANCE = variable("instance", "label_values(lmtier_build_info, instance)")
TIER = variable("tier", 'label_values(lmtier_hit_tokens_total{instance=~"$instance"}, tier)')
ENGINE = variable("instance", "label_values(vllm:prompt_tokens_total, instance)")
MODEL = variable("model", 'label_values(vllm:prompt_tokens_total{instance=~"$instance"}, model_name)')
_MODEL = ', model_name=~"$model"'
_TIER = ', tier=~"$tier"'
_UP = ', direction="up"'

_SERVER = ', job=~".*lmtier.*"'
READY = f"{selected('lmtier_ready')} or on (job, instance) ({selected('up', _SERVER)} == 0)"
"""A server that is down exposes nothing. It is not ready."""


def overview() -> dict[str, Any]:
    return dashboard(
        "lmtier-overview",
        "lmtier: overview",
        [INSTANCE],
        [
            row("Is it working?"),
            panel(
                "Ready",
                (f"min({READY})", ""),
                kind="stat",
                width=4,
                steps=_RED_GREEN,
                text="1: every server is up and knows what its tiers hold.",
            ),
            panel(
                "Engines",
                (gauge("lmtier_clients", extra=', kind="engine"'), ""),
                kind="stat",
                width=4,
                text="Connections of engines. 0: no engine asks.",
            ),
            panel("Lookups", (rate("lmtier_lookups_total"), ""), kind="stat", width=4, unit="reqps"),
            panel(
                "Breakers open",
                (gauge("lmtier_breaker_open"), ""),
                kind="stat",
                width=4,
                steps=_GREEN_RED,
                text="Tiers that fail and are left alone, each way counted.",
            ),
            panel(
                "Corrupt objects",
                (gauge("lmtier_tier_failures_total", extra=', reason="corrupt"'), ""),
                kind="stat",
                width=4,
                steps=_GREEN_RED,
                text="Found and deleted, since the start.",
            ),
            panel(
                "Version",
                (gauge("lmtier_build_info", "version", how="count"), "{{version}}"),
                kind="stat",
                width=4,
            ),
            row("What does it save me?"),
            panel(
                "Hit ratio, by tier",
                (
                    ratio(
                        rate("lmtier_hit_tokens_total", "tier"),
                        f"on() group_left() {rate('lmtier_asked_tokens_total')}",
                    ),
                    "{{tier}}",
                ),
                unit="percentunit",
                stack=True,
                top=1,
                text="The share of asked tokens that need not be computed, and where it was.",
            ),
            panel(
                "Tokens",
                (rate("lmtier_asked_tokens_total"), "asked"),
                (rate("lmtier_hit_tokens_total"), "hit"),
                (rate("lmtier_stored_tokens_total", extra=', tier="cpu"'), "stored"),
                (rate("lmtier_skipped_tokens_total"), "not stored again"),
                unit="cps",
            ),
            panel(
                "Tokens not computed, in this time",
                (f"sum(increase({selected('lmtier_hit_tokens_total')}[$__range]))", ""),
                kind="stat",
                text="What the hits of the time shown have saved.",
                instant=True,
            ),
            row("Why was that a miss?"),
            panel(
                "Missed tokens, by reason",
                (rate("lmtier_missed_tokens_total", "reason") + " > 0", "{{reason}}"),
                unit="cps",
                stack=True,
                width=12,
                text="docs/METRICS.md says what each reason means.",
            ),
            panel(
                "Tokens that should have been stored and were not",
                (rate("lmtier_dropped_tokens_total", "tier, reason"), "{{tier}}: {{reason}}"),
                unit="cps",
                width=12,
            ),
            row("Is it the bottleneck?"),
            panel(
                "Seconds of one lookup",
                (quantile(0.5, "lmtier_lookup_seconds"), "median"),
                (quantile(0.99, "lmtier_lookup_seconds"), "99 %"),
                unit="s",
            ),
            panel(
                "The owner's thread",
                (rate("lmtier_owner_seconds_total", "instance"), "{{instance}}"),
                unit="percentunit",
                top=1,
                text="Of one CPU. Near 100 % it is the limit.",
            ),
            panel(
                "Loads, 99 %",
                (quantile(0.99, "lmtier_transfer_seconds", "tier", _UP), "{{tier}}"),
                unit="s",
                text="From being asked for until it is in the slab, queueing included.",
            ),
            row("Should I buy more memory?"),
            panel(
                "Hit ratio at other sizes",
                (
                    f"avg by (tier, size_factor) ({selected('lmtier_mrc_hit_ratio')} >= 0)",
                    "{{tier}} × {{size_factor}}",
                ),
                kind="bargauge",
                unit="percentunit",
                top=1,
                instant=True,
                text="If this tier were alone, LRU, and so many times as large; from recent lookups. "
                "Flat to the right of × 1: more memory would not help.",
            ),
            panel(
                "In use",
                (
                    ratio(gauge("lmtier_used_bytes", "tier"), gauge("lmtier_capacity_bytes", "tier")),
                    "{{tier}}",
                ),
                unit="percentunit",
                top=1,
            ),
            panel(
                "Evicted chunks",
                (rate("lmtier_evictions_total", "tier, cause"), "{{tier}}: {{cause}}"),
                unit="cps",
                text="A full cache evicts; it matters if `evicted` is among the reasons for misses.",
            ),
        ],
    )


def tiers() -> dict[str, Any]:
    way = "{{tier}} {{direction}}"
    return dashboard(
        "lmtier-tiers",
        "lmtier: tiers",
        [INSTANCE, TIER],
        [
            row("What they hold"),
            panel(
                "Bytes",
                (gauge("lmtier_used_bytes", "tier", _TIER), "{{tier}}"),
                (gauge("lmtier_capacity_bytes", "tier", _TIER), "{{tier}} capacity"),
                unit="bytes",
            ),
            panel("Chunks", (gauge("lmtier_chunks", "tier", _TIER), "{{tier}}")),
            panel(
                "In the slab, and cannot leave now", (gauge("lmtier_leased_bytes"), "leased"), unit="bytes"
            ),
            row("What they move"),
            panel(
                "Throughput",
                (rate_of_tiers("lmtier_transfer_bytes_sum", "tier, direction"), way),
                unit="Bps",
                text="`down` is storing, `up` is loading.",
            ),
            panel(
                "Bandwidth of one transfer",
                (
                    ratio(
                        rate_of_tiers("lmtier_transfer_bytes_sum", "tier, direction"),
                        rate_of_tiers("lmtier_transfer_seconds_sum", "tier, direction"),
                    ),
                    way,
                ),
                unit="Bps",
                text="Bytes over seconds, queueing included.",
            ),
            panel(
                "Seconds of one transfer",
                *(
                    (quantile(share, "lmtier_transfer_seconds", "tier, direction", _TIER), f"{way} {name}")
                    for share, name in ((0.5, "median"), (0.99, "99 %"))
                ),
                unit="s",
            ),
            panel(
                "Bytes of one transfer, median",
                (quantile(0.5, "lmtier_transfer_bytes", "tier, direction", _TIER), way),
                unit="bytes",
            ),
            panel(
                "Tokens stored", (rate_of_tiers("lmtier_stored_tokens_total", "tier"), "{{tier}}"), unit="cps"
            ),
            panel("Tokens found", (rate_of_tiers("lmtier_hit_tokens_total", "tier"), "{{tier}}"), unit="cps"),
            row("What holds them up"),
            panel(
                "Jobs waiting or running", (gauge("lmtier_queue_depth", "tier, op", _TIER), "{{tier}} {{op}}")
            ),
            panel(
                "Breakers open",
                (gauge("lmtier_breaker_open", "tier, direction", _TIER, how="max"), way),
                top=1,
            ),
            panel(
                "Objects that failed",
                (
                    rate_of_tiers("lmtier_tier_failures_total", "tier, op, reason"),
                    "{{tier}} {{op}}: {{reason}}",
                ),
                unit="cps",
            ),
            panel(
                "Tokens not stored",
                (rate_of_tiers("lmtier_dropped_tokens_total", "tier, reason"), "{{tier}}: {{reason}}"),
                unit="cps",
            ),
            panel(
                "Evicted chunks",
                (rate_of_tiers("lmtier_evictions_total", "tier, cause"), "{{tier}}: {{cause}}"),
                unit="cps",
            ),
            panel(
                "Memory of the process",
                (gauge("process_resident_memory_bytes", "instance"), "{{instance}}"),
                unit="bytes",
                text="The slab included.",
            ),
        ],
    )


def fleet() -> dict[str, Any]:
    name = "{{instance}}"
    hits = ratio(rate("lmtier_hit_tokens_total", "instance"), rate("lmtier_asked_tokens_total", "instance"))

    def of_outcome(metric: str, by: str, outcome: str) -> str:
        return rate(f"lmtier_{metric}_tokens_total", by, f', outcome="{outcome}"')

    def hits_by(by: str) -> str:
        return ratio(of_outcome(by, by, "hit"), of_outcome(by, by, "asked"))

    return dashboard(
        "lmtier-fleet",
        "lmtier: fleet",
        [INSTANCE],
        [
            row("Which server needs help?"),
            panel(
                "The lowest hit ratios",
                (f"bottomk(5, {hits})", name),
                kind="bargauge",
                unit="percentunit",
                top=1,
                instant=True,
                text="The servers to look at first. `lmtier top --server HOST …` shows them in a terminal.",
            ),
            panel("Hit ratio, by server", (hits, name), unit="percentunit", top=1),
            panel(
                "Tiers down, by server",
                (gauge("lmtier_breaker_open", "instance, tier", how="max"), f"{name} {{{{tier}}}}"),
                top=1,
                text="1: the tier fails and is paused.",
            ),
            panel(
                "Memory in use, by server",
                (
                    ratio(
                        gauge("lmtier_used_bytes", "instance", ', tier="cpu"'),
                        gauge("lmtier_capacity_bytes", "instance", ', tier="cpu"'),
                    ),
                    name,
                ),
                unit="percentunit",
                top=1,
            ),
            panel(
                "The owner's thread, by server",
                (rate("lmtier_owner_seconds_total", "instance"), name),
                unit="percentunit",
                top=1,
            ),
            panel("Ready, by server", (f"min by (instance) ({READY})", name), top=1),
            row("Who uses it?"),
            panel("Hit ratio, by model", (hits_by("model"), "{{model}}"), unit="percentunit", top=1),
            panel(
                "Tokens asked, by model",
                (of_outcome("model", "model", "asked"), "{{model}}"),
                unit="cps",
                stack=True,
            ),
            panel("Hit ratio, by tenant", (hits_by("tenant"), "{{tenant}}"), unit="percentunit", top=1),
            panel(
                "Tokens asked, by tenant",
                (of_outcome("tenant", "tenant", "asked"), "{{tenant}}"),
                unit="cps",
                stack=True,
                text="The names in `shares=`, and `other`.",
            ),
            panel(
                "Values of Redis clients",
                (rate("lmtier_values_total", "event"), "{{event}}"),
                unit="ops",
                text="`hit` and `missed` are reads.",
            ),
            panel(
                "Wrong tokens",
                (rate("lmtier_wrong_tokens_total", "instance"), name),
                unit="cps",
                text="A client guesses, or has an old token.",
            ),
        ],
    )


def engines() -> dict[str, Any]:
    def engine(metric: str, by: str = "", extra: str = "") -> str:
        return rate(metric, by, _MODEL + extra)

    def share(name: str) -> str:
        return ratio(engine(f"vllm:{name}_hits_total"), engine(f"vllm:{name}_queries_total"))

    return dashboard(
        "lmtier-engines",
        "lmtier: engines",
        [ENGINE, MODEL],
        [
            row("What does it save me?"),
            panel(
                "Hit ratio",
                (share("external_prefix_cache"), "lmtier, of what vLLM lacked"),
                (share("prefix_cache"), "vLLM's own"),
                unit="percentunit",
                top=1,
            ),
            panel(
                "Prompt tokens, by source",
                (engine("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),
                unit="cps",
                stack=True,
            ),
            panel(
                "Seconds to the first token",
                *(
                    (quantile(part, "vllm:time_to_first_token_seconds", "", _MODEL), name)
                    for part, name in ((0.5, "median"), (0.95, "95 %"))
                ),
                unit="s",
            ),
            row("The connector"),
            panel(
                "Tokens",
                (engine("lmtier:loaded_tokens_total"), "loaded"),
                (engine("lmtier:saved_tokens_total"), "saved"),
                unit="cps",
            ),
            panel(
                "Copied",
                (engine("lmtier:load_bytes_total"), "into the engine"),
                (engine("lmtier:save_bytes_total"), "out of the engine"),
                unit="Bps",
            ),
            panel(
                "Bandwidth of a copy",
                (
                    ratio(engine("lmtier:load_bytes_total"), engine("lmtier:load_seconds_total")),
                    "into the engine",
                ),
                (
                    ratio(engine("lmtier:save_bytes_total"), engine("lmtier:save_seconds_total")),
                    "out of the engine",
                ),
                unit="Bps",
            ),
            panel(
                "Failures",
                (engine("lmtier:load_failures_total"), "loads"),
                (engine("lmtier:save_failures_total"), "saves"),
                (engine("lmtier:unserved_total"), "no server"),
                unit="cps",
                text="A failed load is recomputed; an engine without a server computes everything.",
            ),
            panel(
                "Seconds spent copying",
                (engine("lmtier:load_seconds_total"), "loading"),
                (engine("lmtier:save_seconds_total"), "saving"),
                unit="percentunit",
                text="Of each second, over all ranks.",
            ),
            row("The engine"),
            panel(
                "Requests",
                (gauge("vllm:num_requests_running", extra=_MODEL), "running"),
                (gauge("vllm:num_requests_waiting", extra=_MODEL), "waiting"),
            ),
            panel(
                "Its KV cache in use",
                (gauge("vllm:kv_cache_usage_perc", "instance", _MODEL, how="max"), "{{instance}}"),
                unit="percentunit",
                top=1,
            ),
        ],
    )


# ---- docs/METRICS.md


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        "Every metric of lmtier: what it counts, and the values of its labels.",
        "",
        "    curl -s http://127.0.0.1:9470/metrics",
        "",
        "A server answers with these metrics and with `process_*`. A `Cache` in your own process has them",
        "in `cache.metrics.registry`. Counters start at 0 with the process, or go on after a takeover. At",
        "every moment, tokens asked equal tokens hit, summed over tiers, plus tokens missed, summed over",
        "reasons.",
        "",
        "Counting a lookup takes .6 µs before its answer, and 5 to 8 µs after it. That is .1 % of a",
        "lookup of 512 chunks through a server, and .4 % of one of 8 chunks. In process it is .1, .6 and",
        "3 % for 512, 64 and 8 chunks (`bench/counting.py`).",
        "",
        "`dashboards/build.py` generates this page from `lmtier/observe/metrics.py`.",
        "",
        "| metric | kind | labels | |",
        "|---|---|---|---|",
    ]
    for family in Metrics().declared:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.text} |")
    for title, values in (
        ("Labels", LABELS),
        ("Reasons for a miss", MISS_REASONS),
        ("Reasons why a token was not stored", DROP_REASONS),
    ):
        lines += ["", f"## {title}", "", "| | |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in values.items()]
    lines += [
        "",
        "## On an engine's own /metrics",
        "",
        "The vLLM connector adds these, summed over all ranks. They have vLLM's labels.",
        "",
        "| metric | |",
        "|---|---|",
    ]
    lines += [f"| `lmtier:{name}_total` | {text} |" for name, text in connector_metrics("COUNTERS").items()]
    lines += [f"| `lmtier:{name}` | {text} |" for name, text in connector_metrics("GAUGES").items()]
    return "\n".join(lines) + "\n"


def connector_metrics(kind: str) -> dict[str, str]:
    """What the connector counts, or measures. Read, not imported: there may be no vLLM here."""
    tree = ast.parse((ROOT / "integrations/lmtier_integrations/vllm/stats.py").read_text())
    (named,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == kind
    )
    found: dict[str, str] = ast.literal_eval(named)
    return found


# ---- all of it


def generated_files() -> dict[str, str]:
    """Path in the repository -> content."""
    boards = {"overview": overview(), "fleet": fleet(), "tiers": tiers(), "engines": engines()}
    return {
        **{
            f"dashboards/grafana/{name}.json": json.dumps(each, indent=1) + "\n"
            for name, each in boards.items()
        },
        "docs/METRICS.md": metrics_page(),
    }


if __name__ == "__main__":
    for path, content in generated_files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(content)
