# SPDX-License-Identifier: Apache-2.0
import dataclasses
import random
from array import array

import pytest

from banyan.routing.reads import DETOUR_S
from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.offline import run_offline
from banyan_lab.sim.resources import UnbalancedBooks
from banyan_lab.sim.systems import SYSTEMS, Fidelity, Reads, deployment
from banyan_lab.sim.workload import Trajectory, agent_set

WORKLOAD = agent_set("agents-32k")


def site(**options):
    return deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1, **options)


@pytest.mark.parametrize("fidelity", Fidelity)
@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_cluster_when_it_plays_agents_then_every_turn_ends_and_all_books_balance(name, fidelity):
    """``run_offline`` audits: bytes in = bytes out for each link, no room held and no load left."""
    outcome = run_offline(SYSTEMS[name], site(fidelity=fidelity), WORKLOAD, num_agents=12)
    drawn = list(WORKLOAD.trajectories(12, Simulation(0).chance("trajectories")))
    assert outcome.num_turns == sum(trajectory.num_turns for trajectory in drawn)
    kv_bytes = site().model.kv_bytes_per_token
    added = [[a + o for a, o in zip(t.appends, t.outputs, strict=True)] for t in drawn]
    assert outcome.written_bytes == pytest.approx(sum(map(sum, added)) * kv_bytes)
    contexts = sum(sum(sum(tokens[:turn]) for turn in range(len(tokens))) for tokens in added)
    expected = 0 if SYSTEMS[name].reads is Reads.NOBODY else contexts * kv_bytes * (1 - outcome.pooled_share)
    assert outcome.read_bytes == pytest.approx(expected)
    assert (outcome.pooled_share > 0) == (SYSTEMS[name].pool_bytes > 0)


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_cluster_when_seeded_alike_then_the_same_to_the_last_bit_and_else_not(name):
    runs = [
        dataclasses.asdict(run_offline(SYSTEMS[name], site(), WORKLOAD, num_agents=10, seed=seed)) for seed in (1, 1, 2)
    ]
    assert repr(runs[0]) == repr(runs[1]) != repr(runs[2])


def one_turn_s(name, *, cached_tokens, new_tokens, output_tokens):
    """TTFT and total time of one turn alone in the cluster, in seconds."""
    seen = []
    sim = Simulation()
    cluster = Cluster(sim, site(), SYSTEMS[name], on_turn=lambda turn, now_s: seen.append((turn, now_s)))
    cluster.start(Trajectory(array("i", [cached_tokens - 1, new_tokens]), array("i", [1, output_tokens])))
    sim.run()
    turn, ended_s = seen[1]
    return turn.prefilled_s - turn.submitted_s, ended_s - turn.submitted_s


def test_turn_when_alone_then_its_time_is_the_sum_of_its_steps():
    """A closed form: read, prefill, load into the decode GPU, one step for each further token."""
    here = site()
    cached, new, output = 30_000, 500, 21
    ttft_s, total_s = one_turn_s("dualpath", cached_tokens=cached, new_tokens=new, output_tokens=output)
    read_s = cached * here.model.kv_bytes_per_token / 50e9
    prefill_s = here.prefill.attention_s(new_tokens=new, cached_tokens=cached) + here.prefill.linear_s(new) / 8
    load_s = cached * here.model.kv_bytes_per_token / 50e9
    assert ttft_s == pytest.approx(read_s + max(prefill_s, load_s, here.decode.layer_s * 30), rel=1e-6)
    step_s = here.decode.step_s(num_requests=1, context_tokens=cached + new + output // 2)
    hand_over_s = (cached + new) * here.model.kv_bytes_per_token / 50e9
    assert total_s - ttft_s == pytest.approx(hand_over_s + (output - 1) * step_s, rel=1e-6)


@pytest.mark.parametrize("cached", [40_000, 400_000])
def test_turn_when_reads_are_split_then_half_is_saved_of_what_a_read_takes_beyond_the_way_through_decode(cached):
    whole, _ = one_turn_s("dualpath", cached_tokens=cached, new_tokens=400, output_tokens=2)
    split, _ = one_turn_s("split", cached_tokens=cached, new_tokens=400, output_tokens=2)
    read_s = cached * site().model.kv_bytes_per_token / 50e9
    assert whole - split == pytest.approx(max(0.0, read_s - DETOUR_S) / 2, rel=1e-3)


def test_turn_when_not_layerwise_then_loading_does_not_hide_behind_compute():
    layerwise = one_turn_s("layerwise", cached_tokens=30_000, new_tokens=400, output_tokens=2)
    basic = one_turn_s("basic", cached_tokens=30_000, new_tokens=400, output_tokens=2)
    here = site()
    prefill_s = here.prefill.attention_s(new_tokens=400, cached_tokens=30_000) + here.prefill.linear_s(400) / 8
    load_s = 30_000 * here.model.kv_bytes_per_token / 50e9
    hidden_s = min(load_s, max(prefill_s, here.decode.layer_s * 30))
    assert basic[0] - layerwise[0] == pytest.approx(hidden_s, rel=1e-3)
    hand_over_s = 30_400 * here.model.kv_bytes_per_token / 50e9
    assert basic[1] - layerwise[1] == pytest.approx(hidden_s + hand_over_s, rel=1e-3)


def test_systems_when_storage_is_the_bottleneck_then_in_the_published_order():
    names = [name for name, system in SYSTEMS.items() if not system.pool_bytes]
    jobs = {name: run_offline(SYSTEMS[name], site(), WORKLOAD, num_agents=250).job_s for name in names}
    assert jobs["oracle"] < jobs["dualpath"] < jobs["dualpath-unscheduled"] < jobs["layerwise"]
    assert jobs["layerwise"] <= jobs["basic"] * 1.005
    assert jobs["dualpath"] < jobs["split"] < 1.05 * jobs["dualpath"], "decode sides idle for a queue of a detour"


def test_network_when_no_bottleneck_is_expected_then_both_fidelities_agree():
    jobs = [
        run_offline(SYSTEMS["dualpath"], site(fidelity=fidelity), WORKLOAD, num_agents=150).job_s
        for fidelity in Fidelity
    ]
    assert jobs[0] == pytest.approx(jobs[1], rel=0.05)


def test_cluster_when_it_grows_with_its_agents_then_each_turn_costs_as_many_events():
    """Growth is linear in events; what the policies cost for each turn grows with the number of groups they look at."""
    costs = []
    for groups in (1, 2, 8):
        here = deployment("deepseek-v3-2", prefill_nodes=2, decode_nodes=4, num_groups=groups)
        outcome = run_offline(SYSTEMS["dualpath"], here, WORKLOAD, num_agents=24 * groups)
        costs.append(outcome.num_events / outcome.num_turns)
    assert costs == pytest.approx([costs[0]] * 3, rel=0.15) and costs[0] < 10


def test_audit_when_a_buffer_is_not_given_back_then_found():
    sim = Simulation()
    cluster = Cluster(sim, site(), SYSTEMS["dualpath"])
    cluster.start(WORKLOAD.draw(random.Random(0)))
    sim.run()
    cluster.audit()
    cluster.prefill_nodes[0].buffer.take(100.0, lambda: None)
    with pytest.raises(UnbalancedBooks, match="p0"):
        cluster.audit()
