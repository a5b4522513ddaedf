# SPDX-License-Identifier: Apache-2.0
"""What a comparison of carriers came to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmark.metrics import paired_ratio, spread

if TYPE_CHECKING:
    from benchmark.carriers import Taken

Row = Mapping[str, Any]
PAGE_SERVER = "page_server"
MEANS = ("write_s", "write_cpu_s", "carried_s", "carried_cpu_s", "compute_s", "compute_cpu_s")
"""Means of a repeat's prompts, then the spread of these."""
EACH = ("lag_s", "carried_stall_s")
"""The spread over all prompts."""


def summarise(
    rows: Sequence[Row],
    alone: Sequence[Row],
    killed: Sequence[Row],
    taken: Mapping[str, Taken],
    prompt_tokens: int,
) -> dict[str, Any]:
    """The figures of each carrier; ratios are within a repeat."""
    by_name = {name: [row for row in rows if row["carrier"] == name] for name in taken}
    page_server_s = _means(by_name[PAGE_SERVER], "carried_s")
    every = [*rows, *alone, *killed]
    return {
        "carriers": {
            name: {
                **_figures(mine, prompt_tokens),
                "ttft_ratio": paired_ratio(_means(mine, "carried_s"), _means(mine, "compute_s")),
                "page_server_ratio": paired_ratio(page_server_s, _means(mine, "carried_s")),
                "memory_bytes_per_page": taken[name].memory_bytes,
                "disk_bytes_per_page": taken[name].disk_bytes,
                "alone": _alone([row for row in alone if row["carrier"] == name]),
                "killed": _killed([row for row in killed if row["carrier"] == name], prompt_tokens),
            }
            for name, mine in by_name.items()
        },
        "outputs_identical": all(row["is_identical"] for row in every),
        "num_compared": len(every),
    }


def _means(rows: Sequence[Row], name: str) -> list[float]:
    """Of each repeat, in their order."""
    repeats = sorted({row["repeat"] for row in rows})
    return [mean(row[name] for row in rows if row["repeat"] == repeat) for repeat in repeats]


def _figures(rows: Sequence[Row], prompt_tokens: int) -> dict[str, Any]:
    return {
        **{name: spread(_means(rows, name)) for name in MEANS},
        **{name: spread([row[name] for row in rows]) for name in EACH},
        "least_token_share": min(row["carried_tokens"] for row in rows) / prompt_tokens,
    }


def _alone(rows: Sequence[Row]) -> dict[str, Any]:
    """By the delay: what share of the prompts had come."""
    delays = sorted({row["delay_s"] for row in rows})
    return {f"{delay:g}": spread([row["token_share"] for row in rows if row["delay_s"] == delay]) for delay in delays}


def _killed(rows: Sequence[Row], prompt_tokens: int) -> dict[str, Any]:
    """By who was killed, in the order in which prompts were asked."""
    found = {}
    for who in dict.fromkeys(row["killed"] for row in rows):
        mine = [row for row in rows if row["killed"] == who]
        found[who] = {
            "num_asked": len(mine),
            "num_right": sum(row["is_identical"] for row in mine),
            "took_s": [round(row["took_s"], 4) for row in mine],
            "token_shares": [row["carried_tokens"] / prompt_tokens for row in mine],
        }
    return found
