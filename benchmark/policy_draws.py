# SPDX-License-Identifier: Apache-2.0
"""What several draws of a trace's sessions say together about a policy against the default one.

The draw decides more than the policy, and repeating the same requests repeats their luck: the draws are the sample
here. All requests of a cell are pooled, so that a draw weighs as many as it has; what other draws would have given is
estimated by drawing from these anew, for both policies alike (a paired bootstrap).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from banyan.config import DEFAULT_POLICY

Cell = tuple[str, str]
"""A kind of server and a policy."""

DEFAULT: Cell = ("peer", DEFAULT_POLICY)
NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
"""Percentiles."""

Draws = dict[int, list[float]]
"""Times to first token of a cell's requests in seconds, all repetitions, by draw."""
Figure = Callable[[np.ndarray], float]


def draws_table(requests: Sequence[dict[str, Any]], draw_of: Callable[[str], tuple[str, int]]) -> str:
    """Markdown of `kind: request` lines: for each trace with several draws, a row for each cell, over the draws that
    both it and the default cell played. `draw_of` splits a trace's name into its own and the draw's number. Ratios are
    to the default cell's, 95 % of the estimates in brackets; failed requests have no time and are left out."""
    rows = [
        "| trace | server | policy | draws | requests | TTFT mean s | TTFT p90 s | mean to default | p90 to default |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for trace, cells in _by_cell(requests, draw_of).items():
        default = cells.get(DEFAULT, {})
        for cell, draws in cells.items():
            common = sorted(draws.keys() & default.keys())
            if len(common) > 1:
                rows.append(_row(trace, cell, [draws[draw] for draw in common], [default[draw] for draw in common]))
    return "\n".join(rows)


def _by_cell(
    requests: Sequence[dict[str, Any]], draw_of: Callable[[str], tuple[str, int]]
) -> dict[str, dict[Cell, Draws]]:
    traces: dict[str, dict[Cell, Draws]] = {}
    for line in requests:
        if line["ttft_s"] is not None:
            trace, draw = draw_of(line["trace"])
            cell = traces.setdefault(trace, {}).setdefault((line["label"], line["policy"]), {})
            cell.setdefault(draw, []).append(line["ttft_s"])
    return traces


def _row(trace: str, cell: Cell, draws: list[list[float]], default: list[list[float]]) -> str:
    pooled = np.concatenate(draws)
    cells = [trace, *cell, str(len(draws)), str(len(pooled)), f"{_mean(pooled):.2f}", f"{_p90(pooled):.2f}"]
    for figure in (_mean, _p90):
        cells.append("1" if cell == DEFAULT else _ratio_cell(figure, draws, default))
    return f"| {' | '.join(cells)} |"


def _ratio_cell(figure: Figure, draws: Sequence[Sequence[float]], default: Sequence[Sequence[float]]) -> str:
    ratio, (low, high) = ratio_over_draws(figure, draws, default)
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def ratio_over_draws(
    figure: Figure, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> tuple[float, tuple[float, float]]:
    """`figure` of all of `ours` over that of all of `theirs`, and where 95 % of the resampled ratios lie; the n-th of
    both are one draw."""

    def ratio(draws: Sequence[int]) -> float:
        return figure(np.concatenate([ours[draw] for draw in draws])) / figure(
            np.concatenate([theirs[draw] for draw in draws])
        )

    generator = random.Random(1)
    all_draws = range(len(ours))
    estimates = [ratio(generator.choices(all_draws, k=len(ours))) for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(estimates, INTERVAL)
    return ratio(all_draws), (float(low), float(high))


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _p90(values: np.ndarray) -> float:
    return float(np.percentile(values, 90))
