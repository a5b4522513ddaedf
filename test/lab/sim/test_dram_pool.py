# SPDX-License-Identifier: Apache-2.0
from array import array

import pytest

from banyan_lab.sim.cluster import Cluster
from banyan_lab.sim.dram_pool import PAGE_TOKENS, DramPool
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.turn import Agent, Turn
from banyan_lab.sim.workload import Trajectory

KV_BYTES = 100.0


def turn(number, *, cached, new, output):
    agent = Agent(Trajectory(array("i", [new]), array("i", [output])), number)
    agent.context_tokens = cached
    return Turn(agent, number, 0.0)


def test_pool_when_a_turn_has_ended_then_the_next_finds_its_full_pages():
    pool = DramPool(1e9, KV_BYTES)
    first = turn(7, cached=0, new=3 * PAGE_TOKENS, output=100)
    pool.keep(first)
    assert pool.held_tokens(turn(7, cached=3 * PAGE_TOKENS + 100, new=10, output=1)) == 3 * PAGE_TOKENS
    assert pool.held_tokens(turn(8, cached=3 * PAGE_TOKENS, new=10, output=1)) == 0
    assert (pool.found_tokens, pool.asked_tokens) == (3 * PAGE_TOKENS, 6 * PAGE_TOKENS + 100)


def test_pool_when_it_is_small_then_who_came_first_goes():
    pool = DramPool(4 * PAGE_TOKENS * KV_BYTES, KV_BYTES)
    for number in range(3):
        pool.keep(turn(number, cached=0, new=2 * PAGE_TOKENS, output=1))
    held = [pool.held_tokens(turn(number, cached=2 * PAGE_TOKENS, new=1, output=1)) for number in range(3)]
    assert held == [0, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS]


def test_pool_when_there_is_none_then_nothing_is_found():
    pool = DramPool(0.0, KV_BYTES)
    pool.keep(turn(0, cached=0, new=2 * PAGE_TOKENS, output=1))
    assert pool.held_tokens(turn(0, cached=2 * PAGE_TOKENS, new=1, output=1)) == 0


@pytest.mark.parametrize("name", ["sgl-mc", "dualpath-pool"])
def test_cluster_when_a_context_is_in_the_pool_then_storage_reads_the_rest_only(name):
    sim, seen = Simulation(), []
    site = deployment("deepseek-27b", prefill_nodes=1, decode_nodes=1)
    cluster = Cluster(sim, site, SYSTEMS[name], on_turn=lambda turn, now_s: seen.append(turn))
    cluster.start(Trajectory(array("i", [20 * PAGE_TOKENS, 40, 40]), array("i", [100, 100, 100])))
    sim.run()
    cluster.audit()
    # The first turn has nothing cached; the second finds all but the last 100 tokens.
    assert [t.stored_tokens for t in seen] == [0, 100, 240]
    read = sum(node.storage_in.bytes_done for node in cluster.prefill_nodes + cluster.decode_nodes)
    assert read == pytest.approx(340 * site.model.kv_bytes_per_token)
