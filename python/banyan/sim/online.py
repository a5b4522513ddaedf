# SPDX-License-Identifier: Apache-2.0
"""Online serving: agents arrive as a Poisson process, and the question is how many per second a system can take.

A run begins in the middle: as many agents as there are on average are already there, each somewhere in its trajectory.
What is submitted during the first part of the run is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from banyan.sim.cluster import Cluster
from banyan.sim.engine import Simulation
from banyan.sim.offline import Latencies
from banyan.sim.systems import Deployment, System
from banyan.sim.workload import AgentSet, poisson_arrivals

TTFT_SLO_S, TPOT_SLO_S = 4.0, 0.05
WARM_S, RUN_S = 200.0, 700.0


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
    system: System, site: Deployment, workload: AgentSet, *, agents_per_s: float, seed: int = 0, run_s: float = RUN_S
) -> Service:
    """Play arrivals at this rate for ``run_s`` seconds."""
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
    counted = [i for i, submitted_s in enumerate(latencies.submitted_s) if submitted_s >= WARM_S]
    if not counted:
        return Service(agents_per_s, 0, math.inf, math.inf, math.inf)
    # Turns still waiting count with the time they have waited: else an overloaded system looks quick.
    waiting = [run_s - turn.submitted_s for turn in cluster.waiting_turns() if turn.submitted_s >= WARM_S]
    ttft_s = [latencies.ttft_s[i] for i in counted] + waiting
    return Service(
        agents_per_s,
        len(counted),
        sum(ttft_s) / len(ttft_s),
        sum(latencies.ttst_s) / max(1, len(latencies.ttst_s)),
        sum(latencies.tpot_s) / max(1, len(latencies.tpot_s)),
    )


def _life_s(site: Deployment, workload: AgentSet) -> float:
    """How long an agent stays at low load: its answers at the fixed step time, and half a second for each prefill."""
    answered = workload.mean_total_tokens * workload.output_share
    return answered * site.decode.fixed_s + workload.mean_turns * 0.5


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
