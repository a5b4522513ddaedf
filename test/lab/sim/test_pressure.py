# SPDX-License-Identifier: Apache-2.0
"""Nodes whose pools are too small: the order of the systems, and that the shipped code decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from banyan.planner.victims import Walk
from banyan_lab.replay import skewed_trace
from banyan_lab.sim import pressure
from banyan_lab.sim.engine import Simulation

SMALL = replace(pressure.CHATS, num_sessions=160, num_cold_prefixes=10, gap_s=0.24)
TRACE = skewed_trace(SMALL)
SITES = pressure.systems(SMALL.block_tokens)


def found(name):
    return pressure.serve(TRACE, SITES[name], num_nodes=2)


def test_systems_when_pools_are_too_small_then_one_capacity_finds_more_than_copies_and_copies_more_than_nothing():
    hits = [found(name).hit_share for name in list(SITES)[:3]]
    assert hits == sorted(hits) and hits[0] < hits[2]
    assert hits[2] > 0.95 * found("one pool for each node").hit_share


def test_front_when_a_prefix_was_computed_and_evicted_at_a_busy_node_then_it_is_not_expected_there():
    """A node that always has something to do never says that nothing is on its way."""
    sim, asked = Simulation(), []
    site = replace(SITES["ranks that share nothing"], num_ranks=1, pool_tokens=40_000)
    front = pressure.Front(sim, site, num_nodes=1, done=lambda request, now_s: None)
    lmetric = front._dispatcher.policy

    class Watched:
        def choose(self, query, candidates, tie_breaks):
            asked.append((dict(query.cached_tokens), front.nodes[0].num_requests))
            return lmetric.choose(query, candidates, tie_breaks)

    front._dispatcher.policy = Watched()
    prompts = [[f"{number}/{page}" for page in range(64)] for number in range(20)]
    for number, pages in enumerate([*prompts, prompts[0]]):
        sim.at(number * 1.0, front.submit, f"session {number}", pages, 64 * site.page_tokens + 1, 10_000)
    sim.run()
    assert all(num_requests for _, num_requests in asked[1:]), "it was idle"
    assert asked[-1][0] == {}


def test_node_when_the_walks_are_taken_away_then_it_stops(monkeypatch):
    class Asked(Exception):
        pass

    def ask(self):
        raise Asked

    monkeypatch.setattr(Walk, "choose", ask)
    with pytest.raises(Asked):
        found("as shipped")


def test_serve_when_seeded_alike_then_the_same():
    assert found("as shipped") == found("as shipped")
