# SPDX-License-Identifier: Apache-2.0
"""Systems x sizes x workloads, offline. The rows are plain values; who calls it saves them with seed and commit."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from banyan_lab.sim.offline import run_offline
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.workload import agent_set

MODEL = "deepseek-27b"
SIZES = ((1, 1), (2, 1), (1, 2))
WORKLOADS = ("agents-32k", "agents-64k")


def run(
    *,
    num_agents: int,
    seed: int = 0,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    workloads: tuple[str, ...] = WORKLOADS,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row for each run, in a fixed order."""
    rows = []
    for workload in workloads:
        for prefill_nodes, decode_nodes in sizes:
            site = deployment(MODEL, prefill_nodes=prefill_nodes, decode_nodes=decode_nodes)
            for name, system in SYSTEMS.items():
                outcome = run_offline(system, site, agent_set(workload), num_agents=num_agents, seed=seed)
                rows.append({"workload": workload, "key": name, **asdict(outcome)})
                progress(f"{workload} {site.title} {name}: {outcome.job_s:.0f} s simulated")
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    """The rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
