# SPDX-License-Identifier: Apache-2.0
"""The table of what sharing costs where nothing is shared, from a report that is kept. Written by ``make docs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.kept_table import command_of, kept_page, kept_table
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "overhead.json"
"""A ``report.json`` of ``make overhead``."""

HEAD = (
    "| ranks | case | requests a second | TTFT | time between tokens | sharing off | scheduler, ms a request "
    "| dispatcher, ms a request |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    rows = (_row(ranks, row) for ranks, rows in run["by_ranks"].items() for row in rows)
    return kept_table(HEAD, rows, _conditions(run))


def _row(ranks: str, row: Mapping[str, Any]) -> str:
    off = row["off"]
    cells = (
        ranks,
        row["case"],
        ranged(row["throughput"]),
        ranged(row["ttft"]),
        "-" if row["step"] is None else ranged(row["step"]),
        f"{off['requests_per_s']:.1f} a second, TTFT {1e3 * off['ttft_s']:.0f} ms",
        f"{row['scheduler_us'] / 1e3:.2f}",
        "-" if ranks == "1" else f"{row['dispatcher_us'] / 1e3:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _conditions(run: Mapping[str, Any]) -> str:
    config = run["config"]
    return (
        f"Sharing on over off: medians of {config['rounds']} rounds in turns (least to most). "
        f"`{command_of('benchmark.overhead', config)}`, "
        f"{place_and_time(run['provenance'])}."
    )
