# SPDX-License-Identifier: Apache-2.0
"""What a policy gives requests of each class, and sessions whose turns change their rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from banyan_lab.replay import RequestClass

CLASSES = tuple(name.value for name in RequestClass)
MOVES = ("stayed", "moved")


def class_table(groups: Mapping[tuple[str, str, str], Sequence[dict[str, Any]]]) -> str:
    """Markdown, of runs by trace, server and policy: mean times to first token by class, and of later turns by whether
    they changed their rank; what came from the store, and the longest queue of reads that was seen. Medians over
    repetitions."""
    titles = [f"{name} s" for name in CLASSES] + [f"turns that {name}: n, s" for name in MOVES]
    head = ["trace", "server", "policy", "n", *titles, "from the store", "read queue"]
    rows = [_class_row(key, some) for key, some in groups.items() if all("follow_ups" in run for run in some)]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def _class_row(key: tuple[str, str, str], runs: Sequence[dict[str, Any]]) -> str:
    cells = [*key, str(len(runs))]
    cells += [_spread([run["by_class"][name]["ttft_s"] for run in runs]) for name in CLASSES]
    for name in MOVES:
        some = [run["follow_ups"][name] for run in runs]
        cells.append(f"{median(one['num_requests'] for one in some):.0f}, {_spread([one['ttft_s'] for one in some])}")
    stored = [100 * run["cached_by_source"]["storage"] / run["prompt_tokens"] for run in runs if run["prompt_tokens"]]
    cells.append(f"{median(stored):.1f} %" if stored else "-")
    longest = [run["read_queues"]["most_tokens"] for run in runs if "read_queues" in run]
    cells.append(str(max(longest)) if longest else "-")
    return f"| {' | '.join(cells)} |"


def _spread(times_s: Sequence[dict[str, float] | None]) -> str:
    means = [one["mean"] for one in times_s if one is not None]
    return f"{median(means):.2f} ({min(means):.2f}-{max(means):.2f})" if means else "-"
