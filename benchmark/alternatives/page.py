# SPDX-License-Identifier: Apache-2.0
"""The report for people: one page with a chart and a table for each workload. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmark.alternatives.figures import ATTENTION, QUANTILES, SOURCES, kib, standing, ttft_beside
from benchmark.charts import Bar, Stack, bar_chart, legend, stack_chart
from benchmark.metrics import median_of
from benchmark.report import html_page, measured_on, number, percent

COLORS = {
    "as_shipped": "#b7b2a8",
    "stock": "#a9a49a",
    "stock_again": "#c4c0b6",
    "router": "#7d93ad",
    "router_hicache": "#9a8fa3",
    "router_hicache_back": "#867a91",
    "hicache_dram": "#c9a98f",
    "hicache": "#b58a6a",
    "lmcache": "#b5a36a",
    "router_lmcache": "#a39259",
    "banyan": "#2f6f4f",
    "banyan_even": "#5c8f78",
    "banyan_store": "#4d9170",
    "banyan_route": "#7fb59a",
}
SOURCE_COLORS = {
    "device": "#2f6f4f",
    "peer": "#e0912f",
    "host": "#5a7fb5",
    "storage": "#8d6bb0",
    "untold": "#9a9a9a",
}
COMPUTED_COLOR = "#e6e3dc"
COLUMNS = (
    *("system", "attention", "cached", "TTFT mean", "p50", "p90", "max", "TPOT mean", "p90", "longest gap"),
    *("DRAM per page", "disk per page", "same tokens", "failed"),
)


def render_html(report: Mapping[str, Any]) -> str:
    """A self-contained page."""
    groups: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault((row["pool_tokens"], row["trace"], row["phase"]), []).append(row)
    parts = ["<h1>Banyan and its alternatives</h1>", f"<p class='lead'>{escape(report['method'])}</p>"]
    parts += [_section(key, rows, report["titles"]) for key, rows in groups.items()]
    parts += [_against(report), _not_run(report), _about(report)]
    return html_page("Banyan and its alternatives", parts)


def _section(key: tuple[int, str, str], rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    pool_tokens, trace, phase = key
    title = f"{trace.replace('_', ' ')}, pools of {pool_tokens:,} tokens" + (
        ", after a restart" if phase == "restart" else ""
    )
    bars, stacks = [], []
    for row in rows:
        name, ttft = titles[row["system"]], row["ttft_s_mean"]
        if ttft:
            bars.append(Bar(name, ttft["median"], ttft["min"], ttft["max"], COLORS[row["system"]]))
        stacks.append(_stack(name, row))
    colors = [*((source, SOURCE_COLORS[source]) for source in SOURCES), ("computed", COMPUTED_COLOR)]
    head = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    body = "".join(_table_row(row, titles) for row in rows)
    return (
        f"<h2>{escape(title)}</h2><h3>Mean time to first token</h3>{bar_chart(bars, unit='s', title=title)}"
        f"<h3>Where the prompts' KV came from</h3>{legend(colors)}{stack_chart(stacks, title=title)}"
        f"<table><tr>{head}</tr>{body}</table>"
    )


def _stack(name: str, row: Mapping[str, Any]) -> Stack:
    parts = [
        (source, found["median"], SOURCE_COLORS[source])
        for source in SOURCES
        if (found := row["cached_by_source"][source]) is not None
    ]
    cached = sum(share for _, share, _ in parts)
    return Stack(name, (*parts, ("computed", max(0.0, 1 - cached), COMPUTED_COLOR)), f"{cached:.1%} cached")


def _table_row(row: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    kept = row["kept"] or {}
    cells = (
        ATTENTION[row["system"]],
        percent(median_of(row["cached_share"])),
        *(f"{number(median_of(row[f'ttft_s_{name}']))} s" for name in QUANTILES),
        *(f"{number(median_of(row[f'tpot_ms_{name}']))} ms" for name in ("mean", "p90")),
        f"{number(median_of(row['longest_gap_ms']))} ms",
        *(kib(kept.get(f"{place}_bytes_per_page")) for place in ("dram", "disk")),
        f"{row['num_identical']}/{row['num_compared']}",
        str(row["num_errors"]),
    )
    name = escape(titles[row["system"]])
    return f"<tr><td>{name}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _against(report: Mapping[str, Any]) -> str:
    titles = report["titles"]
    rows = "".join(
        f"<tr><td>{escape(titles[one['ours']])}</td><td>{escape(titles[one['other']])}</td>"
        f"<td>{escape(one['trace'])}, {one['pool_tokens']:,}</td>"
        f"<td>{100 * one['hits']['median']:+.1f} points</td><td>{standing(one)}</td><td>{ttft_beside(one)}</td></tr>"
        for one in report["against"]
    )
    if not rows:
        return ""
    return (
        "<h2>Banyan against each of the others</h2><p>Times compare where the attention is the same.</p>"
        "<table><tr><th>ours</th><th>other</th><th>workload</th><th>cached share, ours less the other's</th>"
        f"<th>hits</th><th>mean TTFT of ours over the other's</th></tr>{rows}</table>"
    )


def _not_run(report: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(report['titles'][one['system']])}</td><td>{escape(one['reason'])}</td></tr>"
        for one in report["not_run"]
    )
    return f"<h2>What did not run</h2><table class='facts'>{rows}</table>" if rows else ""


def _about(report: Mapping[str, Any]) -> str:
    alone = ", ".join(
        f"{report['titles'][name]} {found['num_identical']}/{found['num_compared']}"
        for name, found in report["alone"].items()
    )
    return measured_on(report, {"asked alone, same tokens as stock": alone})
