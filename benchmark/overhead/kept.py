# SPDX-License-Identifier: Apache-2.0
"""The table of what sharing costs where nothing is shared, from a report that is kept. Written by ``make docs``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.kept_table import command_of, kept_table
from benchmark.metrics import ranged, spread
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "overhead.json"
"""A ``report.json`` of ``make overhead``."""

VOID = 100.0
"""A ratio of times between tokens that is so large, or so small, is of a round in which one side told no such time."""

BY_ANSWER = "by answer"
"""How a report's times between tokens were taken; older reports do not say it, and have gaps between events."""

HEAD = (
    "| ranks | case | requests a second | TTFT | time between tokens | sharing off | scheduler, ms a request "
    "| dispatcher, ms a request |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return page(json.loads(KEPT.read_text()))


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
        "-" if row["step"] is None else _steps(row["step"]),
        f"{off['requests_per_s']:.1f} a second, TTFT {1e3 * off['ttft_s']:.0f} ms",
        f"{row['scheduler_us'] / 1e3:.2f}",
        "-" if ranks == "1" else f"{row['dispatcher_us'] / 1e3:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def is_void(ratio: float) -> bool:
    """Whether one side told next to no time between tokens in this round, whichever side it was."""
    return not 1 / VOID < ratio < VOID


def _steps(ratio: Mapping[str, Any]) -> str:
    """Without void rounds; how many are left, where any is void."""
    found = spread([value for value in ratio["values"] if not is_void(value)])
    if found is None:
        return "-"
    num_left = len(found["values"])
    return ranged(found) if num_left == len(ratio["values"]) else f"{ranged(found)}, {num_left} rounds"


def _void(run: Mapping[str, Any]) -> str:
    """A sentence on each void round."""
    found = (
        f" Left out is one round of {row['case']} on {ranks} ranks, in which sharing "
        f"{'off' if value >= VOID else 'on'} told next to no time between its tokens (ratio {value:,.4g})."
        for ranks, rows in run["by_ranks"].items()
        for row in rows
        for value in (row["step"] or {"values": ()})["values"]
        if is_void(value)
    )
    return "".join(found)


def _gaps(run: Mapping[str, Any]) -> str:
    """What is to be known of times between tokens that are gaps between events."""
    if run.get("step") == BY_ANSWER:
        return ""
    return (
        " Time between tokens is that of the median gap between events. Events that a client reads together are "
        "microseconds apart, so a client that gets too little of a core tells too little. Since this run the time is "
        "that from the first token to the last, by the tokens that came then, as a median over answers."
    )


def _conditions(run: Mapping[str, Any]) -> str:
    config = run["config"]
    return (
        f"Sharing on over off: medians of {config['rounds']} rounds in turns (least to most). "
        f"`{command_of('benchmark.overhead', config)}`, "
        f"{place_and_time(run['provenance'])}.{_void(run)}{_gaps(run)}"
    )
