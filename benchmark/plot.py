# SPDX-License-Identifier: Apache-2.0
"""A picture of result lines: time to first token per run, and where the prompt tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

SOURCE_COLORS = {
    "device": "#2f6f4f",
    "peer": "#e0912f",
    "host": "#5a7fb5",
    "storage": "#8d6bb0",
    "untold": "#9a9a9a",
}
COMPUTED_COLOR = "#e6e3dc"
TTFT_COLOR = "#2f6f4f"


def plot_runs(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of the `kind: run` lines in `runs`; repetitions of a server's run are averaged, spread
    shown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(f"{run['label']}\nrun {run['run']}", []).append(run)
    names = list(groups)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(max(8.0, 1.6 * len(names) + 4), 4.2))
    _draw_ttft(left, names, groups)
    _draw_sources(right, names, groups)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw_ttft(axes: Any, names: Sequence[str], groups: dict[str, list[dict[str, Any]]]) -> None:
    for place, name in enumerate(names):
        values = [run["ttft_s"]["mean"] for run in groups[name] if run["ttft_s"]]
        if not values:
            continue
        middle = mean(values)
        axes.bar(place, middle, color=TTFT_COLOR, width=0.6)
        axes.errorbar(place, middle, [[middle - min(values)], [max(values) - middle]], color="black", capsize=4)
        axes.text(place, middle, f" {middle:.2f} s", ha="left", va="bottom", fontsize=8)
    axes.set_title("mean time to first token (spread over repetitions)", fontsize=9)
    axes.set_ylabel("seconds")
    axes.set_xticks(range(len(names)), names, fontsize=8)


def _draw_sources(axes: Any, names: Sequence[str], groups: dict[str, list[dict[str, Any]]]) -> None:
    for place, name in enumerate(names):
        prompt_tokens = sum(run["prompt_tokens"] for run in groups[name])
        if not prompt_tokens:
            continue
        bottom = 0.0
        for source, color in SOURCE_COLORS.items():
            share = 100 * sum(run["cached_by_source"].get(source, 0) for run in groups[name]) / prompt_tokens
            axes.bar(place, share, bottom=bottom, color=color, width=0.6, label=source if place == 0 else None)
            bottom += share
        label = "computed" if place == 0 else None
        axes.bar(place, 100 - bottom, bottom=bottom, color=COMPUTED_COLOR, width=0.6, label=label)
    axes.set_title("where the prompt's KV came from", fontsize=9)
    axes.set_ylabel("% of prompt tokens")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.legend(fontsize=7, loc="lower right")
