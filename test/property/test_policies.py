# SPDX-License-Identifier: Apache-2.0
"""What holds for every policy, behind the guard and without it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from banyan.routing import POLICIES, HotRankGuard, Query, RankState, SeededTieBreaks
from banyan.routing.place import place

NUM_RANKS = 5
LOADS = ("num_running", "num_waiting", "pending_prefill_tokens", "ongoing_tokens", "read_queue_tokens")

# Few distinct values, so that ties, thresholds and idle ranks come up.
tokens = st.sampled_from([0, 0, 16, 1_000, 1_008, 60_000, 300_000])
requests = st.integers(0, 3)
guards = st.sampled_from([HotRankGuard(math.inf), HotRankGuard(), HotRankGuard(1.0)])
seeds = st.integers(0, 2**64)
states = st.builds(
    RankState,
    rank=st.just(0),
    num_running=requests,
    num_waiting=requests,
    pending_prefill_tokens=tokens,
    ongoing_tokens=tokens,
    read_queue_tokens=tokens,
    unused_tokens=st.none() | tokens,
    last_turn=st.integers(-1, 3),
)
every_policy = pytest.mark.parametrize("policy", [make() for make in POLICIES.values()], ids=list(POLICIES))


@st.composite
def situations(draw) -> tuple[Query, list[RankState]]:
    ranks = [replace(state, rank=rank) for rank, state in enumerate(draw(st.lists(states, min_size=1, max_size=5)))]
    num_prompt_tokens = draw(st.sampled_from([1, 16, 1_008, 60_000]))
    cached = {state.rank: min(draw(tokens), num_prompt_tokens - 1) for state in ranks}
    query = Query(
        turn=draw(st.integers(0, 1000)),
        num_prompt_tokens=num_prompt_tokens,
        cached_tokens=cached,
        fetchable_tokens=draw(st.sampled_from([0, max(cached.values())])),
        session_rank=draw(st.none() | st.integers(0, NUM_RANKS)),
    )
    return query, ranks


def chosen(policy, query, ranks, guard, tie_breaks):
    return place(policy, query, ranks, guard=guard, tie_breaks=tie_breaks)


@every_policy
@given(situation=situations(), guard=guards, seed=seeds)
def test_choice_when_ranks_are_hot_then_none_of_them(policy, situation, guard, seed):
    query, ranks = situation
    choice = chosen(policy, query, ranks, guard, SeededTieBreaks(seed))
    active = {state.rank for state in ranks}
    assert choice.rank in active.difference(choice.hot_ranks)
    assert active.issuperset(choice.hot_ranks)


@every_policy
@given(situation=situations(), guard=guards, seed=seeds, order=st.permutations(range(NUM_RANKS)))
def test_choice_when_ranks_come_in_another_order_then_the_same(policy, situation, guard, seed, order):
    query, ranks = situation
    shuffled = [ranks[place] for place in order if place < len(ranks)]
    tie_breaks = SeededTieBreaks(seed)
    expected, choice = (chosen(policy, query, some, guard, tie_breaks) for some in (ranks, shuffled))
    assert (choice.rank, choice.reason) == (expected.rank, expected.reason)


@every_policy
@given(situation=situations(), guard=guards, seed=seeds, names=st.permutations(range(NUM_RANKS)))
def test_choice_when_ranks_are_renamed_then_renamed_too(policy, situation, guard, seed, names):
    """No rank is preferred for its number. The tie-breaks are renamed with the ranks: they are what ties are drawn
    from."""
    query, ranks = situation
    tie_breaks = SeededTieBreaks(seed)
    renamed_query = replace(
        query,
        cached_tokens={names[rank]: num for rank, num in query.cached_tokens.items()},
        session_rank=names[query.session_rank] if query.session_rank in range(NUM_RANKS) else query.session_rank,
    )
    renamed_ranks = [replace(state, rank=names[state.rank]) for state in ranks]
    expected = chosen(policy, query, ranks, guard, tie_breaks)
    choice = chosen(policy, renamed_query, renamed_ranks, guard, lambda turn, rank: tie_breaks(turn, names.index(rank)))
    assert choice.rank == names[expected.rank]


@every_policy
@given(
    situation=situations(),
    guard=guards,
    seed=seeds,
    which=st.integers(0, NUM_RANKS - 1),
    more=st.dictionaries(st.sampled_from(LOADS), st.sampled_from([1, 1_000, 400_000]), min_size=1),
)
def test_choice_when_a_rank_gets_more_load_then_it_does_not_win(policy, situation, guard, seed, which, more):
    query, ranks = situation
    which %= len(ranks)
    tie_breaks = SeededTieBreaks(seed)
    busier = list(ranks)
    busier[which] = replace(
        ranks[which], **{name: getattr(ranks[which], name) + increment for name, increment in more.items()}
    )
    before, after = chosen(policy, query, ranks, guard, tie_breaks), chosen(policy, query, busier, guard, tie_breaks)
    if before.rank != which:
        assert after.rank != which


@every_policy
@given(situation=situations(), guard=guards, seed=seeds)
def test_choice_when_asked_twice_then_the_same(policy, situation, guard, seed):
    query, ranks = situation
    first = chosen(policy, query, ranks, guard, SeededTieBreaks(seed))
    assert first == chosen(policy, query, ranks, guard, SeededTieBreaks(seed))


@given(situation=situations(), guard=guards)
def test_guard_when_ranks_are_hot_then_the_least_loaded_one_stays(situation, guard):
    query, ranks = situation
    idlest = min(ranks, key=lambda state: state.ongoing_tokens)
    assert idlest in guard.cool(query, ranks)
