# SPDX-License-Identifier: Apache-2.0
from array import array

import pytest

from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.latencies import Latencies, Part, parts_s
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.turn import Agent, Turn
from banyan_lab.sim.workload import Trajectory, agent_set

CACHED, NEW, OUTPUT = 30_000, 500, 21


def played(name, *, until_s=float("inf"), num_agents=1):
    """The cluster, and the latencies of the second turns of so many equal agents."""
    sim, latencies = Simulation(), Latencies()
    site = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)
    cluster = Cluster(sim, site, SYSTEMS[name], on_turn=latencies.add)
    trajectory = Trajectory(array("i", [CACHED - 1, NEW]), array("i", [1, OUTPUT]))
    for _ in range(num_agents):
        cluster.start(trajectory, from_turn=1)
    sim.run(until_s=until_s)
    return cluster, latencies


def test_parts_when_a_turn_is_alone_then_reading_and_computing_are_all_of_it():
    cluster, latencies = played("dualpath")
    site = cluster.site
    parts = latencies.mean_parts_s
    assert parts[Part.READ] == pytest.approx(CACHED * site.model.kv_bytes_per_token / 50e9)
    prefill_s = site.prefill.attention_s(new_tokens=NEW, cached_tokens=CACHED) + site.prefill.linear_s(NEW) / 8
    load_s = CACHED * site.model.kv_bytes_per_token / 50e9
    assert parts[Part.COMPUTE] == pytest.approx(max(prefill_s, load_s, site.decode.layer_s * 30))
    assert [parts[part] for part in (Part.RANK, Part.MEMORY, Part.PASS)] == [0.0, 0.0, 0.0]
    assert latencies.ttft_s == pytest.approx(parts[Part.READ] + parts[Part.COMPUTE])


def test_second_token_when_a_turn_is_alone_then_a_hand_over_and_a_step():
    cluster, latencies = played("dualpath")
    site = cluster.site
    step_s = site.decode.step_s(num_requests=1, context_tokens=CACHED + NEW + OUTPUT // 2)
    hand_over_s = (CACHED + NEW) * site.model.kv_bytes_per_token / 50e9
    assert latencies.tpot_s == pytest.approx(step_s)
    assert latencies.ttst_s == pytest.approx(hand_over_s + step_s)


def test_parts_when_nothing_is_read_then_only_passes_count():
    _, latencies = played("oracle")
    parts = latencies.mean_parts_s
    assert parts[Part.READ] == parts[Part.MEMORY] == 0.0 < parts[Part.COMPUTE]


def test_parts_when_memory_is_full_then_the_wait_for_it_is_not_reading():
    """58 GB of each of eight ranks hold some 70 such prompts."""
    _, calm = played("basic", num_agents=8)
    _, full = played("basic", num_agents=1_200)
    assert calm.mean_parts_s[Part.MEMORY] == 0.0 < full.mean_parts_s[Part.MEMORY]
    assert full.num_turns == full.num_first == 1_200


def test_waiting_turns_when_the_run_is_cut_then_they_count_with_the_stage_they_are_in():
    cluster, latencies = played("dualpath", until_s=0.005)
    latencies.add_waiting(cluster.waiting_turns(), 0.005)
    assert latencies.num_turns == 0 and latencies.mean_parts_s[Part.READ] == pytest.approx(0.005)
    assert latencies.ttft_s == pytest.approx(0.005)


def test_parts_when_nothing_was_reached_then_the_wait_is_for_a_rank():
    turn = Turn(Agent(agent_set("agents-32k").draw(Simulation().chance("one")), 0), 0, 2.0)
    assert parts_s(turn, 5.0) == [3.0, 0.0, 0.0, 0.0, 0.0]


def test_latencies_when_turns_were_submitted_too_early_then_not_counted():
    cluster, late = played("dualpath")
    early = Latencies(since_s=1.0)
    early.add_waiting(cluster.waiting_turns(), 2.0)
    turn = Turn(Agent(Trajectory(array("i", [5]), array("i", [5])), 0), 0, 0.5)
    early.add(turn, 2.0)
    assert early.num_turns == early.num_first == 0 and late.num_turns == 1
