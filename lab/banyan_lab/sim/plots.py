# SPDX-License-Identifier: Apache-2.0
"""Pictures of the simulator's tables. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from banyan_lab.sim.figures import Figure
from banyan_lab.sim.latencies import Part
from banyan_lab.sim.online import TTFT_SLO_S, Service

MAX_ROWS = 42
"""Of one picture."""
PUBLISHED_COLOUR, SIMULATED_COLOUR = "#9aa5b1", "#1f6f8b"


def draw(study: str, figures: Sequence[Figure], folder: Path) -> list[Path]:
    """A picture for each unit, or several: simulated bars, published ones beside them where there are."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    by_unit: dict[str, list[Figure]] = defaultdict(list)
    for figure in figures:
        by_unit[figure.unit].append(figure)
    paths = []
    pages = [
        (unit, rows[start : start + MAX_ROWS])
        for unit, rows in by_unit.items()
        for start in range(0, len(rows), MAX_ROWS)
    ]
    for number, (unit, rows) in enumerate(pages):
        canvas, axes = pyplot.subplots(figsize=(9, 0.8 + 0.5 * len(rows)), layout="constrained")
        places = range(len(rows), 0, -1)
        axes.barh(
            [p - 0.2 for p in places], [r.simulated for r in rows], 0.36, color=SIMULATED_COLOUR, label="simulated"
        )
        published = [(p + 0.2, r.published) for p, r in zip(places, rows, strict=True) if r.published is not None]
        if published:
            axes.barh(*zip(*published, strict=True), 0.36, color=PUBLISHED_COLOUR, label="published")
        axes.set_yticks(list(places), [r.name for r in rows], fontsize=7)
        axes.set_xlabel(f"{unit} (simulated)")
        axes.legend(fontsize=7)
        path = folder / f"{study}-{number}.svg"
        canvas.savefig(path, metadata={"Date": None})
        pyplot.close(canvas)
        paths.append(path)
    return paths


def draw_sweep(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Job times by system, one panel for each workload and size."""
    pyplot = _pyplot()
    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        panels[f"{row['workload']} {row['site']}"].append(row)
    canvas, grid = pyplot.subplots(
        1, len(panels), figsize=(2.6 * len(panels), 3.6), sharey=False, layout="constrained", squeeze=False
    )
    for axes, (title, members) in zip(grid[0], panels.items(), strict=True):
        axes.bar([row["key"] for row in members], [row["job_s"] for row in members], color=SIMULATED_COLOUR)
        axes.set_title(title, fontsize=8)
        axes.tick_params(axis="x", rotation=90, labelsize=7)
    grid[0][0].set_ylabel("job time, s (simulated)")
    path = folder / "sweep.svg"
    canvas.savefig(path, metadata={"Date": None})
    pyplot.close(canvas)
    return path


def draw_parts(runs: Mapping[str, Sequence[Service]], folder: Path) -> Path:
    """Time to the first token by arrival rate, stacked by its parts, one panel for each system."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    canvas, grid = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), layout="constrained", squeeze=False)
    for axes, (title, services) in zip(grid[0], runs.items(), strict=True):
        names = [f"{service.agents_per_s:g}" for service in services]
        below = [0.0] * len(services)
        for part in Part:
            values = [service.parts_s[part] for service in services]
            axes.bar(names, values, bottom=below, label=part.value)
            below = [low + value for low, value in zip(below, values, strict=True)]
        axes.axhline(TTFT_SLO_S, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("agents/s")
        axes.set_ylim(0, 2 * TTFT_SLO_S)
    grid[0][0].set_ylabel("mean time to the first token, s (simulated)")
    grid[0][0].legend(fontsize=7)
    path = folder / "rates-parts.svg"
    canvas.savefig(path, metadata={"Date": None})
    pyplot.close(canvas)
    return path


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "banyan"
    from matplotlib import pyplot

    return pyplot
