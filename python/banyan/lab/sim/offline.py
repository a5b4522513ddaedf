# SPDX-License-Identifier: Apache-2.0
"""Offline batch: all agents begin at once, and the job is done with the last one. What DualPath calls JCT."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from banyan.lab.sim.cluster import Cluster
from banyan.lab.sim.engine import Simulation
from banyan.lab.sim.nodes import Node
from banyan.lab.sim.systems import Deployment, System
from banyan.lab.sim.turn import Turn
from banyan.lab.sim.workload import AgentSet
from banyan.routing.dualpath import DualPath

BEGINNING_SHARE = 0.05


@dataclass(slots=True)
class Latencies:
    """Of every finished turn, in seconds. TPOT is the mean time of a turn's tokens after the first."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    ttst_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    submitted_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, turn: Turn, now_s: float) -> None:
        self.submitted_s.append(turn.submitted_s)
        self.ttft_s.append(turn.prefilled_s - turn.submitted_s)
        if turn.output_tokens > 1:
            tpot_s = (now_s - turn.begun_decode_s) / (turn.output_tokens - 1)
            self.tpot_s.append(tpot_s)
            self.ttst_s.append(turn.begun_decode_s - turn.prefilled_s + tpot_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run showed. Utilisations are shares of the job's time; attention is that of its first 5 %."""

    system: str
    site: str
    num_agents: int
    num_turns: int
    num_events: int
    job_s: float
    prefill_nic_share: float
    decode_nic_share: float
    prefill_busy_share: float
    nic_max_over_mean: float
    attention_max_over_mean: float
    read_bytes: float
    written_bytes: float
    mean_ttft_s: float


def run_offline(
    system: System,
    site: Deployment,
    workload: AgentSet,
    *,
    num_agents: int,
    seed: int = 0,
    policy: DualPath | None = None,
) -> Outcome:
    """Play ``num_agents`` trajectories that start together."""
    sim = Simulation(seed)
    latencies = Latencies()
    cluster = Cluster(sim, site, system, on_turn=latencies.add, policy=policy)
    for trajectory in workload.trajectories(num_agents, sim.chance("trajectories")):
        cluster.start(trajectory)
    sim.run()
    cluster.audit()
    return describe(cluster, latencies, num_agents)


def describe(cluster: Cluster, latencies: Latencies, num_agents: int) -> Outcome:
    """The figures of a run that has ended."""
    job_s = cluster.sim.now_s
    groups = cluster.prefill_groups
    nodes = cluster.prefill_nodes + cluster.decode_nodes
    read = [node.storage_in.bytes_done for node in nodes]
    return Outcome(
        system=cluster.system.title,
        site=cluster.site.title,
        num_agents=num_agents,
        num_turns=cluster.num_turns,
        num_events=cluster.sim.num_events,
        job_s=job_s,
        prefill_nic_share=_busy_share(cluster.prefill_nodes, job_s),
        decode_nic_share=_busy_share(cluster.decode_nodes, job_s),
        prefill_busy_share=sum(group.busy_s for group in groups) / len(groups) / job_s,
        nic_max_over_mean=max(read) * len(read) / sum(read) if sum(read) else 1.0,
        attention_max_over_mean=sum(group.balance.max_over_mean(BEGINNING_SHARE * job_s) for group in groups)
        / len(groups),
        read_bytes=sum(read),
        written_bytes=cluster.written_bytes,
        mean_ttft_s=sum(latencies.ttft_s) / max(1, len(latencies.ttft_s)),
    )


def _busy_share(nodes: list[Node], job_s: float) -> float:
    return sum(node.storage_in.busy_s for node in nodes) / len(nodes) / job_s
