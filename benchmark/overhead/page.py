# SPDX-License-Identifier: Apache-2.0
"""The report as a page: one table of ratios, and one of hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:75em}td,th{padding:.15em 1em .15em 0;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.above{color:#b00020}"
)


def write_rows(by_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """The page, by the number of ranks."""
    parts = [f'<!doctype html><meta charset="utf-8"><title>Overhead</title><style>{STYLE}</style><h1>Overhead</h1>']
    parts.append("<p>Sharing on against off with nothing to share: medians of rounds in turns (least to most).</p>")
    for ranks, rows in by_ranks.items():
        parts.append(f"<h2>{ranks} rank{'s' if ranks > 1 else ''}</h2>{_ratios(rows)}{_hooks(rows)}")
    return "".join(parts)


def _ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "<tr><th>case</th><th>throughput</th><th>TTFT</th><th>step</th><th>off</th><th>scheduler, us a request</th>"
        "<th>us a step</th><th>dispatcher, us a request</th></tr>"
    )
    return f"<table>{head}{''.join(map(_row, rows))}</table>"


def _row(row: Mapping[str, Any]) -> str:
    off = row["off"]
    idle = f"step {off['step_s'] * 1e3:.2f} ms" if "step_s" in off else f"TTFT {off['ttft_s'] * 1e3:.1f} ms"
    step = "" if row["scheduler_step_us"] is None else f"{row['scheduler_step_us']:.1f}"
    cells = [
        row["case"],
        *(_spread(row[name]) for name in ("throughput", "ttft", "step")),
        f"{off['requests_per_s']:.1f}/s, {idle}",
        f"{row['scheduler_us']:.0f}",
        step,
        f"{row['dispatcher_us']:.0f}",
    ]
    above = "".join(f'<tr class="above"><td colspan="8">{escape(line)}</td></tr>' for line in row["above"])
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>{above}"


def _spread(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})"


def _hooks(rows: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for row in rows for name in row["hooks"]})
    head = "".join(f"<th>{escape(row['case'])}</th>" for row in rows)
    lines = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{_call(row, name)}</td>' for row in rows)}</tr>" for name in names
    )
    return f"<h3>Hooks: us a call, calls</h3><table><tr><th></th>{head}</tr>{lines}</table>"


def _call(row: Mapping[str, Any], name: str) -> str:
    hook = row["hooks"].get(name)
    return "" if hook is None else f"{hook['us_a_call']:.1f}, {hook['num_calls']:.0f}"
