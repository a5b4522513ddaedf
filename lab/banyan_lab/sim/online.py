# SPDX-License-Identifier: Apache-2.0
"""Online serving: agents arrive as a Poisson process, and the question is how many per second a system can take.

A run begins in the middle: as many agents are there as a system that just meets the SLO has, each somewhere in its
trajectory. A system that can take more works them off while the run warms up; one that cannot never does. What is
submitted during the first half is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.latencies import Latencies, Part
from banyan_lab.sim.systems import Deployment, System
from banyan_lab.sim.workload import AgentSet, poisson_arrivals

TTFT_SLO_S, TPOT_SLO_S = 4.0, 0.05
WARM_S, RUN_S = 700.0, 1_400.0
BISECTIONS = 5


@dataclass(frozen=True, slots=True)
class Service:
    """Means over the turns that were submitted in the counted part; those without a first token with their wait."""

    agents_per_s: float
    num_turns: int
    ttft_s: float
    ttst_s: float
    tpot_s: float
    hand_over_s: float
    parts_s: Mapping[Part, float]

    @property
    def meets_slo(self) -> bool:
        return self.num_turns > 0 and self.ttft_s <= TTFT_SLO_S and self.tpot_s <= TPOT_SLO_S

    @property
    def queued_s(self) -> float:
        """The time to the first token without reading and computing."""
        return self.parts_s[Part.RANK] + self.parts_s[Part.MEMORY] + self.parts_s[Part.PASS]


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
    latencies = Latencies(since_s=warm_s)
    cluster = Cluster(sim, site, system, on_turn=latencies.add)
    chance = sim.chance("trajectories")
    for _ in range(round(agents_per_s * _life_s(site, workload))):
        trajectory = workload.draw(chance)
        cluster.start(trajectory, from_turn=chance.randrange(trajectory.num_turns))
    for time_s in poisson_arrivals(agents_per_s, run_s, sim.chance("arrivals")):
        sim.at(time_s, cluster.start, workload.draw(chance))
    sim.run(until_s=run_s)
    cluster.audit()
    latencies.add_waiting(cluster.waiting_turns(), run_s)
    return Service(
        agents_per_s,
        latencies.num_turns,
        latencies.ttft_s,
        latencies.ttst_s,
        latencies.tpot_s,
        latencies.hand_over_s,
        latencies.mean_parts_s,
    )


def _life_s(site: Deployment, workload: AgentSet) -> float:
    """How long an agent stays: its answers at the fixed step time, and the SLO's time to first token for each turn."""
    answered = workload.mean_total_tokens * workload.output_share
    return answered * site.decode.fixed_s + workload.mean_turns * TTFT_SLO_S


def capacity(
    system: System,
    site: Deployment,
    workload: AgentSet,
    *,
    low: float,
    high: float,
    seed: int = 0,
    warm_s: float = WARM_S,
    run_s: float = RUN_S,
) -> float:
    """The most agents per second that meet the SLO, by bisection between a rate that does and one that does not."""

    def does(rate: float) -> bool:
        run = serve(system, site, workload, agents_per_s=rate, seed=seed, warm_s=warm_s, run_s=run_s)
        return run.meets_slo

    while not does(low):
        low, high = low / 2, low
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if does(middle):
            low = middle
        else:
            high = middle
    return low
