# SPDX-License-Identifier: Apache-2.0
"""Offline batch: all agents begin at once, and the job is done with the last one. What DualPath calls JCT."""

from __future__ import annotations

from dataclasses import dataclass

from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.latencies import Latencies
from banyan_lab.sim.nodes import Node
from banyan_lab.sim.systems import Deployment, System
from banyan_lab.sim.workload import AgentSet

BEGINNING_SHARE = 0.05


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
    pooled_share: float


def run_offline(
    system: System,
    site: Deployment,
    workload: AgentSet,
    *,
    num_agents: int,
    seed: int = 0,
) -> Outcome:
    """Play ``num_agents`` trajectories that start together."""
    sim = Simulation(seed)
    latencies = Latencies()
    cluster = Cluster(sim, site, system, on_turn=latencies.add)
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
        mean_ttft_s=latencies.ttft_s,
        pooled_share=cluster.pool.found_tokens / max(1, cluster.pool.asked_tokens),
    )


def _busy_share(nodes: list[Node], job_s: float) -> float:
    return sum(node.storage_in.busy_s for node in nodes) / len(nodes) / job_s
