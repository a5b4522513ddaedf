# SPDX-License-Identifier: Apache-2.0
"""The table of what sharing costs where nothing is shared, from a report that is kept. Written by ``make docs``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.kept_table import kept_table
from benchmark.metrics import ranged, spread
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "overhead.json"
"""A ``report.json`` of ``make overhead``."""

VOID = 100.0
"""A ratio of times between tokens that is so large is of a round in which sharing off told no such time."""

HEAD = (
    "| ranks | case | requests a second | TTFT | time between tokens | sharing off | scheduler, ms a request "
    "| dispatcher, ms a request |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    run = json.loads(KEPT.read_text())
    rows = (_row(ranks, row) for ranks, rows in run["by_ranks"].items() for row in rows)
    return kept_table(HEAD, rows, _conditions(run))


def _row(ranks: str, row: Mapping[str, Any]) -> str:
    off = row["off"]
    cells = (
        ranks,
        row["case"],
        ranged(row["throughput"]),
        ranged(row["ttft"]),
        "-" if row["step"] is None else _steps(row["step"]),
        f"{off['requests_per_s']:.1f} a second, TTFT {1e3 * off['ttft_s']:.0f} ms",
        f"{row['scheduler_us'] / 1e3:.2f}",
        "-" if ranks == "1" else f"{row['dispatcher_us'] / 1e3:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _steps(ratio: Mapping[str, Any]) -> str:
    """Without void rounds."""
    found = spread([value for value in ratio["values"] if value < VOID])
    return "-" if found is None else ranged(found)


def _void(run: Mapping[str, Any]) -> str:
    """A sentence on each void round."""
    found = (
        f" Left out is one round of {row['case']} on {ranks} ranks, in which sharing off told next to no time between "
        f"its tokens (ratio {value:,.0f})."
        for ranks, rows in run["by_ranks"].items()
        for row in rows
        for value in (row["step"] or {"values": ()})["values"]
        if value >= VOID
    )
    return "".join(found)


def _conditions(run: Mapping[str, Any]) -> str:
    config = run["config"]
    return (
        f"Sharing on over off: medians of {config['rounds']} rounds in turns (least to most). `python -m "
        f"benchmark.overhead`, {place_and_time(run['provenance'])}.{_void(run)}"
    )
