# SPDX-License-Identifier: Apache-2.0
"""The table of docs/benchmarks/ranks.md, from a run whose report is kept beside it. Written by ``make docs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.kept_table import kept_page, kept_table
from benchmark.metrics import ranged
from benchmark.provenance import place_and_time

KEPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "ranks.json"
"""A ``report.json`` of ``make ranks``."""

HEAD = (
    "| ranks | requests a rank | prompts | found again: off, on | TTFT, run 1 | latency, run 1 | TTFT, run 2 "
    "| TTFT in run 2: off, on | p90 of TPOT | requests a second in run 2: off, on | failed |"
)


def table() -> str:
    """The rows of the kept run, and where it ran."""
    return kept_page(KEPT, page)


def page(run: Mapping[str, Any]) -> str:
    return kept_table(HEAD, map(_row, run["rows"]), _conditions(run))


def _row(row: Mapping[str, Any]) -> str:
    off, on = (row["kinds"][kind]["2"] for kind in ("off", "on"))
    cells = (
        row["dp"],
        row["requests_per_rank"],
        row["num_prompts"],
        f"{off['cached_share']['median']:.1%}, {on['cached_share']['median']:.1%}",
        ranged(row["ttft_ratios"]["1"]),
        ranged(row["latency_ratios"]["1"]),
        ranged(row["ttft_ratios"]["2"]),
        f"{off['ttft_s_mean']['median']:.2f} s, {on['ttft_s_mean']['median']:.2f} s",
        ranged(row["tpot_p90_ratio"]),
        f"{off['completed_per_s']['median']:.1f}, {on['completed_per_s']['median']:.1f}",
        row["num_errors"],
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _conditions(run: Mapping[str, Any]) -> str:
    """Command, hardware, workload and commit."""
    sizes, config = run["sizes"], run["config"]
    return (
        f"`python -m benchmark.ranks --repetitions {config['repetitions']}`, "
        f"{place_and_time(run['provenance'])}. The model `{sizes['model']}` of `benchmark/modes/models.py`, with "
        f"random weights; prompts of {sizes['prompt_tokens']} tokens, answers of {sizes['output_tokens']}; medians "
        f"(and spread) of {config['repetitions']} alternations; TPOT over both runs."
    )
