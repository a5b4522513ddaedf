# SPDX-License-Identifier: Apache-2.0
"""A picture of dispatch policies: mean time to first token of each, for every trace and server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

COLORS = {"stock_rr": "#9a9a9a", "stock_tokens": "#c9c4ba", "index": "#5a7fb5", "peer": "#2f6f4f"}


def plot_policies(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of `kind: run` lines: one panel for each trace, medians with the spread of the repetitions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(run["trace"] for run in runs))
    if not traces:
        raise ValueError("no run to plot")
    figure, panels = pyplot.subplots(1, len(traces), figsize=(4.6 * len(traces), 5.2), squeeze=False)
    for axes, trace in zip(panels[0], traces, strict=True):
        _draw(axes, trace, [run for run in runs if run["trace"] == trace])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw(axes: Any, trace: str, runs: Sequence[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["ttft_s"]:
            groups.setdefault((run["label"], run["policy"]), []).append(run["ttft_s"]["mean"])
    names = list(groups)
    for place, name in enumerate(names):
        values = groups[name]
        middle = median(values)
        axes.barh(place, middle, color=COLORS.get(name[0], "#8d6bb0"), height=0.7)
        axes.errorbar(middle, place, xerr=[[middle - min(values)], [max(values) - middle]], color="black", capsize=3)
    axes.set_yticks(range(len(names)), [f"{label} {policy}" for label, policy in names], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(trace, fontsize=9)
    axes.set_xlabel("mean time to first token, s", fontsize=8)
