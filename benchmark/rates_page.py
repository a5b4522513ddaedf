# SPDX-License-Identifier: Apache-2.0
"""The table of docs/benchmarks/rates.md, from a run whose report is kept beside it. Written by ``make docs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.alternatives.figures import ATTENTION
from benchmark.kept_table import command_of, kept_page, kept_table
from benchmark.metrics import median, paired_ratio, ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "rates.json"
"""A ``report.json`` of ``python -m benchmark.rate_sweep``."""

HEAD = (
    "| system | attention | requests/s | times | sent | within 1, 2 idle hits | within 5 | TTFT mean, p50, p90 "
    "| mean over the router's | cached | failed |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    rows = [
        _row(run, name, per_s, within)
        for name, verdict in run["verdicts"]["systems"].items()
        for per_s, within in verdict["within"].items()
    ]
    return kept_table(HEAD, rows, _conditions(run))


def played_at(run: Mapping[str, Any], name: str, per_s: str) -> list[Mapping[str, Any]]:
    """What a system made of a rate, each time that it was played."""
    return [rate for one in run["systems"].get(name, ()) for rate in one["rates"] if f"{rate['per_s']:g}" == per_s]


def mean_ttft_to_router(run: Mapping[str, Any], name: str, per_s: str) -> Mapping[str, Any] | None:
    """Of a system, over that of SGLang's router with the same requests; None where one of them lacks a repetition."""
    own, routers = ([rate["ttft_s"]["mean"] for rate in played_at(run, one, per_s)] for one in (name, "router"))
    return paired_ratio(own, routers) if len(own) == len(routers) else None


def _row(run: Mapping[str, Any], name: str, per_s: str, within: Mapping[str, Mapping[str, Any]]) -> str:
    """Medians over the times that this rate was played."""
    played, ratio = played_at(run, name, per_s), mean_ttft_to_router(run, name, per_s)
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
        "-" if ratio is None else ranged(ratio),
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
