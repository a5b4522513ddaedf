# SPDX-License-Identifier: Apache-2.0
"""DualPath's third baseline, SGL(MC): SGLang with Mooncake's DRAM pool over 3FS. The review has no figure of it.

Assumed: Basic's prefill, placement and hand-over, and in front of storage one pool of 1.5 TB a node, which is what the
source says that Mooncake requires. The simulated agents do not pause between turns, so that a pool has a context
still when the next turn asks for it, even a small one: what it finds is the most that a pool can find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from banyan_lab.sim.figures import DUALPATH, Figure
from banyan_lab.sim.offline import Outcome
from banyan_lab.sim.systems import POOL_BYTES, SYSTEMS, System

Offline = Callable[[System], Outcome]
"""Plays a system on 660B 2P4D with the set of 64K."""

SMALL_POOL_BYTES = 80e9
"""Of each node: what DualPath has as its buffer."""


def figures(offline: Offline) -> Iterator[Figure]:
    """SGL(MC) beside Basic and DualPath, with much DRAM and with little, and both together."""
    basic, dual, pooled = (offline(SYSTEMS[name]) for name in ("basic", "dualpath", "sgl-mc"))
    small = offline(replace(SYSTEMS["sgl-mc"], title="SGL(MC), 80 GB", pool_bytes=SMALL_POOL_BYTES))
    for run, pool_bytes in ((pooled, POOL_BYTES), (small, SMALL_POOL_BYTES)):
        for other in (basic, dual):
            yield Figure(
                name=f"660B 2P4D 64K: SGL(MC) with {pool_bytes / 1e9:g} GB a node over {other.system}, job time",
                published=None,
                simulated=run.job_s / other.job_s,
                unit="x",
                source=f"{DUALPATH}: SGL(MC) is a baseline; the review has no figure of it",
                note=f"{100 * run.pooled_share:.1f} % of the cached tokens came from DRAM",
            )
    both = offline(SYSTEMS["dualpath-pool"])
    yield Figure(
        name="660B 2P4D 64K: DualPath with a pool of 1500 GB a node over DualPath, job time",
        published=1.0,
        simulated=both.job_s / dual.job_s,
        unit="x",
        source=f"{DUALPATH}: 'can be combined, but gains are marginal'",
        within=0.1,
        note=f"no number is published; {100 * both.pooled_share:.1f} % of the cached tokens came from DRAM",
    )
