# SPDX-License-Identifier: Apache-2.0
"""``banyan bench gpu`` with bounds: figures that would make sharing pointless, or harmful, fail the step.

The bounds are shares of what the same GPU does with a plain copy, and times of the calling thread: loose, so that they
hold on every GPU, and tight enough to show a kernel that does not move whole words, or a driver that waits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from server_check import verdict_line

from banyan.transport.cuda_ipc.copy_stream import BACKUP_PROGRAMS
from banyan_lab.bench import gpu

LEAST_OF_DEVICE_COPY = 0.1
"""A grid of 64: well above what a link between GPUs moves."""

LEAST_OF_PINNED_COPY = 0.6
"""Up and down, each on the grid that it has in a server."""

MOST_LAUNCH_US, MOST_WAIT_US = 200.0, 20.0

Rows = Sequence[Mapping[str, Any]]


def verdict(rows: Rows) -> dict[str, bool]:
    copies = [row for row in rows if row["what"] == "copy" and row["num_programs"] == 64]
    best = {shape: max(r["ratio"] for r in copies if r["shape"] == shape) for shape in {r["shape"] for r in copies}}
    arena = [row for row in rows if row["what"].startswith("arena") and row["engine"] == "kernel"]
    (launch,) = (row for row in rows if row["what"].startswith("launch"))
    (wait,) = (row for row in rows if row["what"].startswith("wait"))
    return {
        "copies_are_faster_than_a_link": bool(best) and min(best.values()) >= LEAST_OF_DEVICE_COPY,
        "the_arena_is_reached_at_the_rate_of_its_link": bool(arena)
        and all(row.get("ratio", 0.0) >= LEAST_OF_PINNED_COPY for row in arena),
        "a_launch_hardly_costs_the_scheduler": launch["caller_us"] <= MOST_LAUNCH_US,
        "a_wait_hardly_costs_the_scheduler": wait["caller_us"] <= MOST_WAIT_US,
    }


def main() -> int:
    rows = gpu.run()
    found = verdict(rows)
    print(json.dumps({"rows": rows, "backup_programs": BACKUP_PROGRAMS, "verdict": found}, indent=2))
    print(f"verdict: {verdict_line(found)}", file=sys.stderr)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
