# SPDX-License-Identifier: Apache-2.0
"""The published figures of sharing between data-parallel ranks, and the same seven metrics of a run here.

Source: LightLLM, "Prefix KV Cache Transfer Between DP Rankers": DeepSeek-R1 on one node of eight H200, 500 ShareGPT
conversations with 20 messages of history, 32 at a time, played twice. Only what one side's sharing changes can be
compared with another machine's, so every row ends in ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmark.metrics import median_of

WHAT = "500 conversations of ShareGPT, history 20, 32 at a time; DeepSeek-R1 on eight H200"
BASE, SHARED = "off", "on"


@dataclass(frozen=True)
class Row:
    """One metric. ``published``: first run without and with sharing, then the second run."""

    title: str
    figure: str
    published: tuple[float, float, float, float]
    digits: int


ROWS = (
    Row("total tokens", "served_tokens", (759_336, 759_336, 759_336, 759_336), 0),
    Row("total time, s", "total_time_s", (118.23, 119.16, 118.46, 115.16), 1),
    Row("requests a second", "completed_per_s", (4.23, 4.20, 4.22, 4.34), 2),
    Row("mean latency, s", "latency_s_mean", (7.43, 7.49, 7.44, 7.23), 2),
    Row("mean time to first token, s", "ttft_s_mean", (0.41, 0.41, 0.41, 0.34), 2),
    Row("mean latency per token, ms", "latency_per_token_ms_mean", (5.1, 5.2, 5.1, 5.0), 2),
    Row("mean time between tokens, ms", "inter_token_latency_ms_mean", (69.3, 69.8, 69.3, 68.0), 1),
)


def beside_the_source(labels: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of ``metric``, ``published`` and ``here`` (medians of repetitions): run 1 off, on, run 2 off, on. Without
    rows where one of the two was not measured."""
    if BASE not in labels or SHARED not in labels:
        return []
    return [
        {
            "metric": row.title,
            "published": list(row.published),
            "here": [
                median_of(labels[label][f"run_{run}"].get(row.figure)) for run in (1, 2) for label in (BASE, SHARED)
            ],
            "digits": row.digits,
        }
        for row in ROWS
    ]


def source_section(rows: list[dict[str, Any]], config: Mapping[str, Any]) -> str:
    """The rows as a part of the page; nothing without rows."""
    if not rows:
        return ""
    columns = ("off", "on", "on/off") * 4
    head = "".join(f"<th>{name}</th>" for name in columns)
    over = "".join(
        f"<th colspan='3'>{escape(name)}</th>"
        for name in ("published, run 1", "published, run 2", "here, run 1", "here, run 2")
    )
    body = "".join(
        f"<tr><td>{escape(row['metric'])}</td>" + "".join(f"<td>{cell}</td>" for cell in cells_of(row)) + "</tr>"
        for row in rows
    )
    return (
        "<h2>Beside the published figures</h2>"
        f"<p>Published: {escape(WHAT)}. Here: {escape(difference(config))}.</p>"
        f"<table><tr><th></th>{over}</tr><tr><th></th>{head}</tr>{body}</table>"
    )


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """Twelve cells: off, on and on/off for published run 1 and 2, then for run 1 and 2 here."""
    cells = []
    for values in (row["published"], row["here"]):
        for off, on in (values[:2], values[2:]):
            ratio = "-" if not off or on is None else f"{on / off:.2f}"
            cells += [_shown(off, row["digits"]), _shown(on, row["digits"]), ratio]
    return cells


def difference(config: Mapping[str, Any]) -> str:
    """What is not as in the source, in one line."""
    return (
        f"{config.get('num_prompts')} conversations of {config.get('dataset')}, history {config.get('history_turns')}, "
        f"{config.get('concurrency')} at a time, answers cut at {config.get('output_len')} tokens; "
        f"{config.get('model')} on SGLang's CPU engine, two ranks"
    )


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
