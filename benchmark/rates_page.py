# SPDX-License-Identifier: Apache-2.0
"""The table of docs/benchmarks/rates.md, from a run whose report is kept beside it. Written by ``make docs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.alternatives.figures import ATTENTION
from benchmark.kept_table import command_of, kept_page, kept_table
from benchmark.metrics import median, ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "rates.json"
"""A ``report.json`` of ``python -m benchmark.rate_sweep``."""

HEAD = (
    "| system | attention | requests/s | times | sent | within 1, 2 idle hits | within 5 | TTFT mean, p50, p90 "
    "| cached | failed |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    rows = [
        _row(name, per_s, within, [rate for one in run["systems"][name] for rate in one["rates"] if at(rate, per_s)])
        for name, verdict in run["verdicts"]["systems"].items()
        for per_s, within in verdict["within"].items()
    ]
    return kept_table(HEAD, rows, _conditions(run))


def at(rate: Mapping[str, Any], per_s: str) -> bool:
    return f"{rate['per_s']:g}" == per_s


def _row(name: str, per_s: str, within: Mapping[str, Mapping[str, Any]], played: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the times that this rate was played."""
    *short, longest = within.values()
    ttfts_s = (median([rate["ttft_s"][figure] for rate in played]) for figure in ("mean", "p50", "p90"))
    cells = (
        name,
        ATTENTION[name],
        per_s,
        len(played),
        sum(rate["num_requests"] for rate in played),
        ", ".join(f"{share['median']:.2f}" for share in short),
        ranged(longest),
        ", ".join(f"{ttft_s:.2f}" for ttft_s in ttfts_s) + " s",
        f"{median([rate['cached_share'] for rate in played]):.1%}",
        sum(rate["num_errors"] for rate in played),
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _conditions(run: Mapping[str, Any]) -> str:
    """Command, hardware, workload and commit, and what each system made of it."""
    sizes, config, said = run["sizes"], run["config"], run["verdicts"]
    goodput = ", ".join(f"{name} {ranged(verdict['goodput_per_s'])}" for name, verdict in said["systems"].items())
    idle = ", ".join(
        f"{name} {median([one['idle_hit_s'] for one in runs]):.2f}" for name, runs in run["systems"].items()
    )
    return (
        f"`{command_of('benchmark.rate_sweep', config)}`, {place_and_time(run['provenance'])}. "
        f"{sizes['num_conversations']} conversations of {sizes['history_tokens']:,} tokens together, pools of "
        f"{sizes['pool_tokens']:,} over two ranks; each rate for {config['seconds']:g} s at a time. Medians, with the "
        f"spread. Requests a second that came within five idle hits, at the best rate: {goodput}. An idle hit: {idle} "
        "s; the quickest counts for all."
    )
