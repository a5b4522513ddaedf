# SPDX-License-Identifier: Apache-2.0
"""Online serving: agents arrive as a Poisson process, and the question is how many per second a system can take.

A run begins in the middle: as many agents are there as a system that just meets the SLO has, each somewhere in its
trajectory. A system that can take more works them off while the run warms up; one that cannot never does. What is
submitted during the first half is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from banyan.lab.sim.cluster import Cluster
from banyan.lab.sim.engine import Simulation
from banyan.lab.sim.offline import Latencies
from banyan.lab.sim.systems import Deployment, System
from banyan.lab.sim.workload import AgentSet, poisson_arrivals

TTFT_SLO_S, TPOT_SLO_S = 4.0, 0.05
WARM_S, RUN_S = 700.0, 1_400.0


@dataclass(frozen=True, slots=True)
class Service:
    """Means over the turns that were submitted in the counted part and got their first token."""

    agents_per_s: float
    num_turns: int
    ttft_s: float
    ttst_s: float
    tpot_s: float

    @property
    def meets_slo(self) -> bool:
        return self.ttft_s <= TTFT_SLO_S and self.tpot_s <= TPOT_SLO_S


def serve(
    system: System,
    site: Deployment,
    workload: AgentSet,
    *,
    agents_per_s: float,
    seed: int = 0,
    warm_s: float = WARM_S,
    run_s: float = RUN_S,
) -> Service:
    """Play arrivals at this rate for ``run_s`` seconds, and count what is submitted after ``warm_s``."""
    sim = Simulation(seed)
    latencies = Latencies()
    cluster = Cluster(sim, site, system, on_turn=latencies.add)
    chance = sim.chance("trajectories")
    for _ in range(round(agents_per_s * _life_s(site, workload))):
        trajectory = workload.draw(chance)
        cluster.start(trajectory, from_turn=chance.randrange(trajectory.num_turns))
    for time_s in poisson_arrivals(agents_per_s, run_s, sim.chance("arrivals")):
        sim.at(time_s, cluster.start, workload.draw(chance))
    sim.run(until_s=run_s)
    cluster.audit()
    counted = [i for i, submitted_s in enumerate(latencies.submitted_s) if submitted_s >= warm_s]
    if not counted:
        return Service(agents_per_s, 0, math.inf, math.inf, math.inf)
    # Turns still waiting count with the time they have waited: else an overloaded system looks quick.
    waiting = [run_s - turn.submitted_s for turn in cluster.waiting_turns() if turn.submitted_s >= warm_s]
    ttft_s = [latencies.ttft_s[i] for i in counted] + waiting
    return Service(
        agents_per_s,
        len(counted),
        sum(ttft_s) / len(ttft_s),
        sum(latencies.ttst_s) / max(1, len(latencies.ttst_s)),
        sum(latencies.tpot_s) / max(1, len(latencies.tpot_s)),
    )


def _life_s(site: Deployment, workload: AgentSet) -> float:
    """How long an agent stays: its answers at the fixed step time, and the SLO's time to first token for each turn."""
    answered = workload.mean_total_tokens * workload.output_share
    return answered * site.decode.fixed_s + workload.mean_turns * TTFT_SLO_S


def capacity(
    system: System, site: Deployment, workload: AgentSet, *, low: float, high: float, steps: int = 5, seed: int = 0
) -> float:
    """The most agents per second that meet the SLO, by bisection between a rate that does and one that does not."""
    while not serve(system, site, workload, agents_per_s=low, seed=seed).meets_slo:
        low, high = low / 2, low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if serve(system, site, workload, agents_per_s=middle, seed=seed).meets_slo:
            low = middle
        else:
            high = middle
    return low
