# SPDX-License-Identifier: Apache-2.0
"""A soak as a page: what was wrong, what was asked, and how everything that could grow went on."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmark.soak.samples import Sample
from benchmark.soak.tally import Tally

Series = Mapping[str, Sequence[tuple[float, float]]]
MIB = 1 << 20


def write(path: Path, tally: Tally, samples: Sequence[Sample], wrong: Sequence[str]) -> None:
    verdict = "".join(f"<li>{escape(line)}</li>" for line in wrong) or "<li>nothing was wrong</li>"
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{count}</td></tr>"
        for name, count in (*sorted(tally.answers.items()), *sorted(tally.disturbances.items()))
    )
    listed = "".join(f"<li>{escape(line)}</li>" for line in (*tally.differing, *tally.errors))
    path.write_text(
        '<!doctype html><meta charset="utf-8"><title>Soak</title>'
        "<style>body{font:15px sans-serif;margin:2em auto;max-width:70em}td{padding:0 1em 0 0}</style>"
        f"<h1>Soak</h1><ul>{verdict}</ul>"
        f"<p>{tally.num_requests} requests, {tally.num_compared} compared, {tally.num_differing} differ, "
        f"{tally.num_errors} errors</p>{_plots(samples)}<table>{rows}</table><ul>{listed}</ul>"
    )


def by_process(samples: Sequence[Sample], figure: str, unit: float) -> Series:
    """One line for each process."""
    names = sorted({name for sample in samples for name in sample.processes})
    return {
        name: [
            (sample.at_s / 60, getattr(sample.processes[name], figure) / unit)
            for sample in samples
            if name in sample.processes
        ]
        for name in names
    }


def by_rank(samples: Sequence[Sample], *figures: str) -> Series:
    """One line for each rank and figure."""
    ranks = sorted({rank for sample in samples for rank in sample.ranks})
    return {
        f"{figure.removeprefix('num_')}, rank {rank}": [
            (sample.at_s / 60, sample.ranks[rank][figure]) for sample in samples if figure in sample.ranks.get(rank, {})
        ]
        for figure in figures
        for rank in ranks
    }


def rate(samples: Sequence[Sample]) -> Series:
    """Requests a second between samples."""
    return {
        "requests": [
            (b.at_s / 60, (b.num_requests - a.num_requests) / (b.at_s - a.at_s))
            for a, b in itertools.pairwise(samples)
            if b.at_s > a.at_s
        ]
    }


PLOTS: dict[str, Callable[[Sequence[Sample]], Series]] = {
    "anonymous memory, MiB": lambda samples: by_process(samples, "anonymous_kb", 1024),
    "resident memory, MiB": lambda samples: by_process(samples, "resident_kb", 1024),
    "file descriptors": lambda samples: by_process(samples, "num_fds", 1),
    "threads": lambda samples: by_process(samples, "num_threads", 1),
    "requests a second": rate,
    "quarantined and read pages": lambda samples: by_rank(samples, "num_quarantined_pages", "num_reading_pages"),
    "published and free pages": lambda samples: by_rank(samples, "num_published_pages", "num_free_pages"),
    "pages of the arena": lambda samples: by_rank(samples, "num_arena_pages", "num_arena_filling_frames"),
    "records in the store": lambda samples: by_rank(samples, "store_num_records", "store_backlog_pages"),
    "store, MiB": lambda samples: {"store": [(one.at_s / 60, one.store_bytes / MIB) for one in samples]},
    "locked tokens, take-backs": lambda samples: by_rank(samples, "num_locked_tokens", "num_take_backs"),
    "faults that were caught": lambda samples: by_rank(samples, "num_failures"),
}


def _plots(samples: Sequence[Sample]) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots((len(PLOTS) + 1) // 2, 2, figsize=(14, 3.2 * len(PLOTS) / 2), squeeze=False)
    for axes, (title, series) in zip(grid.flat, PLOTS.items(), strict=False):
        for name, points in series(samples).items():
            axes.plot([x for x, _ in points], [y for _, y in points], label=name, linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    pyplot.close(figure)
    return text.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
