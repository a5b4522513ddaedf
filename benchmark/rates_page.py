# SPDX-License-Identifier: Apache-2.0
"""The table of docs/benchmarks/rates.md, from a run whose report is kept beside it. Written by ``make docs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.alternatives.figures import ATTENTION
from benchmark.kept_table import command_of, kept_page, kept_table
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "rates.json"
"""A ``report.json`` of ``python -m benchmark.rate_sweep``."""

HEAD = "| system | attention | requests/s | sent | within 1, 2, 5 idle hits | TTFT mean, p50, p90 | cached | failed |"


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    rows = [
        _row(name, rate, run["verdicts"]["systems"][name]["within"][f"{rate['per_s']:g}"])
        for name, system in run["systems"].items()
        for rate in system["rates"]
    ]
    return kept_table(HEAD, rows, _conditions(run))


def _row(name: str, rate: Mapping[str, Any], within: Mapping[str, float]) -> str:
    ttft_s = rate["ttft_s"]
    cells = (
        name,
        ATTENTION[name],
        f"{rate['per_s']:g}",
        rate["num_requests"],
        ", ".join(f"{share:.2f}" for share in within.values()),
        ", ".join(f"{ttft_s[figure]:.2f}" for figure in ("mean", "p50", "p90")) + " s",
        f"{rate['cached_share']:.1%}",
        rate["num_errors"],
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _conditions(run: Mapping[str, Any]) -> str:
    """Command, hardware, workload and commit, and what each system made of it."""
    sizes, config, said = run["sizes"], run["config"], run["verdicts"]
    goodput = ", ".join(f"{name} {verdict['goodput_per_s']:.2f}" for name, verdict in said["systems"].items())
    idle = ", ".join(f"{name} {system['idle_hit_s']:.2f}" for name, system in run["systems"].items())
    return (
        f"`{command_of('benchmark.rate_sweep', config)}`, {place_and_time(run['provenance'])}. "
        f"{sizes['num_conversations']} conversations of {sizes['history_tokens']:,} tokens together, pools of "
        f"{sizes['pool_tokens']:,} over two ranks; each rate once, for {config['seconds']:g} s. Requests a second that "
        f"came within five idle hits, at the best rate: {goodput}. An idle hit: {idle} s; the quickest counts for all."
    )
