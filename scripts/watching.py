# SPDX-License-Identifier: Apache-2.0
"""What Prometheus and Grafana need to watch Banyan, made from the code that names its metrics: ``make docs``.

The alert rules of ranks are those of ``banyan.observe.alerts``; here are those of whole servers, the router's, and the
dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from banyan.observe.alerts import PLACED, RULES
from banyan.telemetry import SERIES, WINDOW_MINUTES

RANKS = SERIES["num_ranks"].name
SERVER_RULES = (
    (
        "BanyanServerGone",
        "critical",
        f"count by (instance) (last_over_time({RANKS}[15m])) unless count by (instance) ({RANKS})",
        "1m",
        "this server's metrics are gone: it has ended or starts again, cannot be reached, or was taken away on purpose",
        "Look at the server's log, and start it if it is wanted. The alert ends when the metrics are back, or after a "
        "quarter of an hour; for longer, watch `up` of your own job.",
        "",
    ),
    (
        "BanyanRankSilent",
        "warning",
        f"{SERIES['num_silent_ranks'].name} > 0",
        "1m",
        "a rank has requests and has not reported for half a minute",
        "Its process is stopped, or in a step that does not end: the server's log names it. Look at `py-spy dump`.",
        "",
    ),
)
"""Of servers as a whole: what no rank shows. The last word of each rule: the label that its summary names beside the
instance, if any."""

ROUTER_RULES = (
    (
        "BanyanRouterServerDown",
        "critical",
        "banyan_router_server_up == 0",
        "1m",
        "the router sends this server nothing: it is down or drained",
        "`curl http://127.0.0.1:30100/router/servers` says why; `/router/resume` ends a drain.",
        "server",
    ),
    (
        "BanyanRouterQueue",
        "warning",
        "banyan_router_waiting > 0",
        "5m",
        "requests wait in the router: every server is full",
        "Add servers, or raise --max-in-flight if their queues are short.",
        "",
    ),
    (
        "BanyanRouterLost",
        "critical",
        'increase(banyan_router_attempts_total{outcome=~"lost|broken"}[5m]) > 0',
        "0m",
        "answers were lost on the way from a server",
        "Look at the server's log: it went away while it answered.",
        "server",
    ),
)
RANK = "rank {{dp_rank}}"
EVERY = "$__rate_interval"
WRITTEN = SERIES["store_written_bytes"].name


def alert_table() -> str:
    """All alerts for people: a part of ``docs/runbook.md``."""
    of_ranks = [(rule.name, rule.severity, rule.summary, rule.advice) for rule in RULES]
    others = [
        (name, severity, summary, advice) for name, severity, _, _, summary, advice, _ in SERVER_RULES + ROUTER_RULES
    ]
    rows = sorted(of_ranks + others, key=lambda row: row[1])
    lines = ["| alert | severity | what it means | what then |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {severity} | {summary} | {advice} |" for name, severity, summary, advice in rows]
    return "\n".join(lines) + "\n"


def alert_rules() -> str:
    """The rules as a file for Prometheus."""
    lines = [
        "# Made by `make docs` from python/banyan/observe/alerts.py and scripts/watching.py.",
        "# Servers: start with --enable-metrics; see docs/operations.md.",
        "groups:",
        "  - name: banyan-ranks",
        "    rules:",
    ]
    for rule in RULES:
        expression = rule.condition.promql()
        lines += _rule(rule.name, rule.severity, expression, rule.held, rule.summary, rule.advice, "dp_rank")
    for group, rules in (("banyan-servers", SERVER_RULES), ("banyan-router", ROUTER_RULES)):
        lines += [f"  - name: {group}", "    rules:"]
        for words in rules:
            lines += _rule(*words)
    return "\n".join(lines) + "\n"


def _rule(name: str, severity: str, expr: str, held: str, summary: str, advice: str, label: str) -> Iterator[str]:
    # A JSON string is a YAML string.
    part = f" {label} {{{{ $labels.{label} }}}}" if label else ""
    who = f"{{{{ $labels.instance }}}}{part}: "
    yield f"      - alert: {name}"
    yield f"        expr: {json.dumps(expr)}"
    yield f"        for: {held}"
    yield f"        labels: {{severity: {severity}}}"
    yield "        annotations:"
    yield f"          summary: {json.dumps(who + summary)}"
    yield f"          description: {json.dumps(advice)}"


@dataclass(frozen=True)
class Panel:
    """``queries``: expression and legend. ``width``: of 24."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    text: str = ""


def of_ranks(name: str) -> str:
    """Of the shards of a rank each moves bytes of its own. All else happens once to the rank, and each counts it."""
    of_shards = f'rate({SERIES[name].name}{{instance=~"$instance"}}[{EVERY}])'
    return of_shards if name.endswith("_bytes") else f"max by (instance, dp_rank) ({of_shards})"


def rate(name: str) -> str:
    return f"sum by (dp_rank) ({of_ranks(name)})"


def total(name: str) -> str:
    return f"sum({of_ranks(name)})"


def gauge(name: str) -> str:
    return f'{SERIES[name].name}{{instance=~"$instance"}}'


def of_nodes(name: str, window: str) -> str:
    """A share that each rank tells of its node: the one's that has heard most."""
    return f"max by (instance) ({gauge(name)} and topk by (instance) (1, {gauge(f'heard_tokens_{window}')}))"


CACHED = " + ".join(total(f"{source}_tokens") for source in ("own", "peer", "host", "store"))

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Hits",
        (
            Panel("Found in a cache", [(f"({CACHED}) / {total('prompt_tokens')}", "")], "percentunit", "stat", 4),
            Panel("Fetched", [(total("fetched_bytes"), "")], "Bps", "stat", 4),
            Panel("Distinct pages in the pools", [(f"avg({gauge('distinct_share')})", "")], "percentunit", "stat", 4),
            Panel(
                "Prompt tokens by source",
                [
                    (total("own_tokens"), "own pool"),
                    (total("peer_tokens"), "peers"),
                    (total("host_tokens"), "arena"),
                    (total("store_tokens"), "store"),
                    (f"{total('prompt_tokens')} - ({CACHED})", "computed"),
                ],
                width=12,
                stacked=True,
                text="Tokens a second of the prompts that were answered, by where they were.",
            ),
            Panel(
                "Could be found at most",
                [
                    (f"({CACHED}) / {total('prompt_tokens')}", "found"),
                    *((of_nodes(f"hit_ceiling_{name}", name), f"ceiling, last {name}") for name in WINDOW_MINUTES),
                ],
                "percentunit",
                width=12,
                text="The ceilings: shares of prompt tokens that were found, or computed before in that time.",
            ),
            Panel(
                "Found with other memory",
                [
                    (of_nodes("hit_share_half", "24h"), "half the arena"),
                    (of_nodes("hit_share_same", "24h"), "as it is"),
                    (of_nodes("hit_share_double", "24h"), "twice the arena"),
                ],
                "percentunit",
                width=12,
                text="What a cache that evicts by age would have found in the last 24h (without an arena: the pools).",
            ),
        ),
    ),
    (
        "Ranks",
        (
            Panel(
                "Free pages of the pool",
                [(f"{gauge('num_free_pages')} / {gauge('num_pool_pages')}", RANK)],
                "percentunit",
            ),
            Panel("Pages in quarantine", [(gauge("num_quarantined_pages"), RANK)]),
            Panel("Fetched from peers and arena", [(rate("fetched_bytes"), RANK)], "Bps"),
            Panel(
                "Pages evicted",
                [
                    (total("evicted_duplicate_pages"), "copies"),
                    (total("evicted_last_pages"), "last copies"),
                    (total("displaced_pages"), "displaced by fetches"),
                ],
                text="Copies lie elsewhere on the node too. Displaced ones made room for a fetch.",
            ),
            Panel("Distinct share", [(gauge("distinct_share"), RANK)], "percentunit"),
            Panel("Live ranks", [(f"min({gauge('num_live_ranks')})", "live"), (f"max({gauge('num_ranks')})", "all")]),
        ),
    ),
    (
        "What it costs",
        (
            Panel(
                "Forwards that wait for pages",
                [(f"{rate('wait_us')} / {rate('forward_us')}", RANK)],
                "percentunit",
                text="On CPUs. On GPUs streams wait, and nothing counts it.",
            ),
            Panel("Scheduler time in Banyan", [(rate("control_us"), RANK)], "percentunit"),
            Panel("Allocations that wait", [(rate("alloc_wait_us"), RANK)], "percentunit"),
            Panel(
                "Fetches",
                [
                    (total("fetches"), "granted"),
                    (total("fetches_refused"), "refused"),
                    (total("fetches_failed"), "failed"),
                    (total("plans_computed"), "computed all the same"),
                ],
                "ops",
            ),
            Panel(
                "Placements, by reason",
                [(total(name), name.removeprefix("placed_")) for name in PLACED],
                "ops",
                stacked=True,
            ),
            Panel("Dispatcher time", [(total("dispatch_us"), "share of a core")], "percentunit"),
        ),
    ),
    (
        "Arena and store",
        (
            Panel("Arena", [(f"{gauge('num_arena_pages')} / {gauge('num_arena_frames')}", RANK)], "percentunit"),
            Panel(
                "Pages on their way",
                [
                    (total("backed_up_pages"), "pool to arena"),
                    (total("backups_dropped_pages"), "not taken down"),
                    (total("archived_pages"), "arena to store"),
                    (total("read_pages"), "store to arena"),
                ],
            ),
            Panel("Store queue", [(gauge("store_backlog_pages"), RANK)]),
            Panel("Written to the store", [(rate("store_written_bytes"), RANK)], "Bps"),
            Panel(
                "Wear: written of the day's allowance",
                [
                    (
                        f"rate({WRITTEN}[6h]) * 86400 / ({gauge('store_write_bytes_per_day')} > 0)",
                        RANK,
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Store trouble",
                [
                    (total("store_checksum_failures"), "damaged pages"),
                    (total("store_stalls"), "stalls"),
                    (total("store_write_errors"), "failed writes"),
                    (total("store_growth_failures"), "failed growths"),
                    (total("store_no_space_pauses"), "no space"),
                    (total("store_put_full"), "queue full"),
                ],
            ),
        ),
    ),
    (
        "Router",
        (
            Panel("Servers up", [("banyan_router_server_up", "{{server}}")]),
            Panel(
                "In flight, and waiting",
                [("banyan_router_in_flight", "{{server}}"), ("banyan_router_waiting", "waiting")],
            ),
            Panel(
                "Attempts", [(f"sum by (outcome) (rate(banyan_router_attempts_total[{EVERY}]))", "{{outcome}}")], "ops"
            ),
            Panel(
                "Placements", [(f"sum by (reason) (rate(banyan_router_choices_total[{EVERY}]))", "{{reason}}")], "ops"
            ),
            Panel(
                "First byte",
                [
                    (
                        f"histogram_quantile({quantile}, sum by (le) "
                        f"(rate(banyan_router_first_byte_seconds_bucket[{EVERY}])))",
                        f"p{quantile * 100:.0f}",
                    )
                    for quantile in (0.5, 0.9, 0.99)
                ],
                "s",
            ),
            Panel(
                "Expected in the chosen cache",
                [
                    (
                        f"sum(rate(banyan_router_cached_tokens_total[{EVERY}])) / "
                        f"sum(rate(banyan_router_prompt_tokens_total[{EVERY}]))",
                        "share of prompt tokens",
                    )
                ],
                "percentunit",
            ),
        ),
    ),
)


def dashboard() -> str:
    """The dashboard as a file for Grafana (import it, or provision it)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        top += 1
        left, height = 0, 8
        for one in row:
            if left + one.width > 24:
                left, top = 0, top + height
            panels.append(_panel(one, len(panels) + 1, {"x": left, "y": top, "w": one.width, "h": height}))
            left += one.width
        top += height
    whole = {
        "uid": "banyan",
        "title": "Banyan",
        "tags": ["banyan", "sglang"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_SOURCE, _INSTANCE]},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


_DATASOURCE = {"type": "prometheus", "uid": "${source}"}
_SOURCE = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
_INSTANCE = {
    "name": "instance",
    "label": "Server",
    "type": "query",
    "datasource": _DATASOURCE,
    "query": {"query": "label_values(banyan:num_ranks, instance)", "refId": "instance"},
    "refresh": 2,
    "includeAll": True,
    "multi": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _panel(one: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 70 if one.stacked else 8, "stacking": {"mode": "normal" if one.stacked else "none"}}
    return {
        "id": number,
        "type": one.kind,
        "title": one.title,
        "description": one.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": one.unit, "min": 0, **({"custom": custom} if one.kind == "timeseries" else {})},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _DATASOURCE, "expr": expr, "legendFormat": legend or "__auto"}
            for at, (expr, legend) in enumerate(one.queries)
        ],
    }
