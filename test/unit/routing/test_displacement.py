# SPDX-License-Identifier: Apache-2.0
"""What a request pushes out counts, where memory is short and only there."""

from __future__ import annotations

import math

import pytest

from banyan.routing import HotRankGuard, Query, RankState
from banyan.routing.displacement import TIMES_LOST, displaced
from banyan.routing.place import place
from banyan.routing.policies import Linear, LMetric, Unified

UNGUARDED = HotRankGuard(math.inf)
COSTS = [LMetric(), Unified(), Linear()]


def ask(**fields):
    return Query(turn=0, num_prompt_tokens=1_000, **fields)


@pytest.mark.parametrize(
    ("unused_tokens", "held", "expected"),
    [(None, 0, 0), (0, 0, 1_000), (0, 900, 100), (400, 0, 600), (5_000, 0, 0)],
)
def test_displaced_when_there_is_room_then_only_what_exceeds_it(unused_tokens, held, expected):
    state = RankState(rank=0, unused_tokens=unused_tokens)
    assert displaced(ask(cached_tokens={0: held}), state) == TIMES_LOST * expected


def ranks(unused_tokens):
    """The holder of the prefix is busy, the other rank is not."""
    return [
        RankState(rank=0, num_waiting=1, pending_prefill_tokens=800, ongoing_tokens=1_000, unused_tokens=unused_tokens),
        RankState(rank=1, unused_tokens=unused_tokens),
    ]


@pytest.mark.parametrize("policy", COSTS, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("unused_tokens", [None, 10_000])
def test_policies_when_there_is_room_then_a_fetch_goes_to_the_idle_rank(policy, unused_tokens):
    query = ask(cached_tokens={0: 960}, fetchable_tokens=960)
    assert place(policy, query, ranks(unused_tokens), guard=UNGUARDED).rank == 1


@pytest.mark.parametrize("policy", COSTS, ids=lambda policy: type(policy).__name__)
def test_policies_when_the_pools_are_full_then_the_prefix_stays_where_it_is(policy):
    query = ask(cached_tokens={0: 960}, fetchable_tokens=960)
    assert place(policy, query, ranks(0), guard=UNGUARDED).rank == 0


@pytest.mark.parametrize("policy", COSTS, ids=lambda policy: type(policy).__name__)
def test_policies_when_nobody_holds_the_prompt_then_the_rank_with_room(policy):
    states = [RankState(rank=0, unused_tokens=0), RankState(rank=1, unused_tokens=2_000)]
    assert place(policy, ask(), states, guard=UNGUARDED).rank == 1
