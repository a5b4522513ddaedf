# SPDX-License-Identifier: Apache-2.0
"""What each policy is for, on situations that a reader can check by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace

from banyan.routing import HotRankGuard, NoActiveRank, Query, RankState, Reason, SeededTieBreaks
from banyan.routing.place import place
from banyan.routing.policies import (
    Affinity,
    DualPath,
    Hybrid,
    Level,
    Linear,
    LMetric,
    RoundRobin,
    SessionSticky,
    Unified,
)

UNGUARDED = HotRankGuard(math.inf)
IDLE = [RankState(rank=0), RankState(rank=1)]


def ask(num_tokens=1_000, **fields):
    return Query(turn=0, num_prompt_tokens=num_tokens, **fields)


def choose(policy, query, ranks):
    choice = place(policy, query, ranks, guard=UNGUARDED)
    return choice.rank, choice.reason


def test_place_when_nobody_is_active_then_it_says_so():
    with pytest.raises(NoActiveRank, match="no rank is active"):
        place(RoundRobin(), ask(), [])


def test_tie_breaks_when_many_are_drawn_then_every_rank_wins_as_often():
    tie_breaks = SeededTieBreaks(7)
    wins = Counter(min(range(4), key=lambda rank: tie_breaks(turn, rank)) for turn in range(4_000))
    assert all(900 < wins[rank] < 1_100 for rank in range(4))


def test_round_robin_when_a_rank_is_inactive_for_a_while_then_the_others_share_its_turns():
    last, order = {0: -1, 1: -1, 2: -1}, []
    for turn in range(9):
        ranks = [RankState(rank=r, last_turn=last[r]) for r in last if not (r == 2 and 3 <= turn < 7)]
        rank, _ = choose(RoundRobin(), replace(ask(), turn=turn), ranks)
        last[rank] = turn
        order.append(rank)
    assert sorted(order[:3]) == [0, 1, 2]
    assert sorted(order[3:7]) == [0, 0, 1, 1]
    assert order[7] == 2


def test_session_sticky_when_the_session_was_somewhere_then_there_again():
    busy = [RankState(rank=0, ongoing_tokens=9_000), RankState(rank=1)]
    assert choose(SessionSticky(), ask(session_rank=0), busy) == (0, Reason.SESSION)
    assert choose(SessionSticky(), ask(), busy) == (1, Reason.LOAD)


def test_session_sticky_when_its_rank_is_hot_then_it_moves():
    busy = [RankState(rank=0, ongoing_tokens=9_000), RankState(rank=1)]
    choice = place(SessionSticky(), ask(session_rank=0), busy)
    assert (choice.rank, choice.reason, choice.hot_ranks) == (1, Reason.LOAD, (0,))


def pending(*tokens):
    return [RankState(rank=rank, pending_prefill_tokens=num) for rank, num in enumerate(tokens)]


def test_level_when_a_hit_would_make_the_fullest_rank_fuller_by_over_a_chunk_then_it_is_passed_over():
    holder = ask(cached_tokens={0: 900}, fetchable_tokens=900)
    assert choose(Level(chunk_tokens=512), holder, pending(6_000, 5_000)) == (1, Reason.LOAD)
    assert choose(Level(chunk_tokens=512), holder, pending(6_000, 5_700)) == (0, Reason.CACHE)


def test_level_when_another_rank_is_the_fullest_anyway_then_the_request_does_not_queue_behind_a_hit():
    holder = ask(cached_tokens={1: 900}, fetchable_tokens=900)
    assert choose(Level(chunk_tokens=512), holder, pending(50_000, 30_000, 0)) == (2, Reason.LOAD)


def test_level_when_nothing_can_be_fetched_then_what_must_be_computed_counts_as_load():
    holder = ask(num_tokens=8_000, cached_tokens={0: 7_000})
    assert choose(Level(chunk_tokens=512), holder, pending(3_000, 0)) == (0, Reason.CACHE)


def test_affinity_when_a_rank_holds_the_prefix_then_no_load_keeps_requests_away():
    busy = [RankState(rank=0, num_running=40, ongoing_tokens=90_000), RankState(rank=1)]
    assert choose(Affinity(), ask(cached_tokens={0: 16}), busy) == (0, Reason.CACHE)
    assert choose(Affinity(), ask(), busy) == (1, Reason.LOAD)
    assert place(Affinity(), ask(cached_tokens={0: 16}), busy).rank == 1, "the guard steps in"


def test_affinity_when_the_prefix_can_be_fetched_then_load_decides():
    busy = [RankState(rank=0, ongoing_tokens=500), RankState(rank=1)]
    assert choose(Affinity(), ask(cached_tokens={0: 896}, fetchable_tokens=896), busy) == (1, Reason.LOAD)
    assert choose(Affinity(), ask(cached_tokens={0: 896}, fetchable_tokens=880), busy) == (0, Reason.CACHE)


def test_linear_when_cached_tokens_outweigh_the_load_then_the_cache_wins():
    ranks = [RankState(rank=0, ongoing_tokens=500), RankState(rank=1)]
    query = ask(cached_tokens={0: 600})
    assert choose(Linear(), query, ranks) == (0, Reason.CACHE)
    assert choose(Linear(), ask(cached_tokens={0: 400}), ranks) == (1, Reason.LOAD)


def test_lmetric_when_all_are_idle_then_the_prefix_still_counts():
    assert choose(LMetric(), ask(cached_tokens={1: 16}), IDLE) == (1, Reason.CACHE)


def test_lmetric_when_the_prefix_can_be_fetched_then_it_does_not_draw_to_a_busier_rank():
    busy = [RankState(rank=0, num_running=1), RankState(rank=1)]
    held = ask(cached_tokens={0: 896})
    assert choose(LMetric(), held, busy) == (0, Reason.CACHE)
    assert choose(LMetric(), replace(held, fetchable_tokens=896), busy) == (1, Reason.LOAD)
    equal = [RankState(rank=0, num_running=1), RankState(rank=1, num_running=1)]
    assert choose(LMetric(), replace(held, fetchable_tokens=896), equal) == (0, Reason.CACHE)


def test_lmetric_when_the_batch_is_larger_then_a_long_prefix_loses():
    ranks = [RankState(rank=0, num_running=9), RankState(rank=1)]
    assert choose(LMetric(), ask(cached_tokens={0: 896}), ranks) == (1, Reason.LOAD)
    assert choose(LMetric(), ask(cached_tokens={0: 928}), ranks) == (0, Reason.CACHE)


def test_unified_when_peers_can_give_the_prefix_then_the_short_queue_wins():
    ranks = [
        RankState(rank=0, pending_prefill_tokens=500, prefill_tokens_per_s=1_000),
        RankState(rank=1, prefill_tokens_per_s=1_000),
    ]
    held = ask(cached_tokens={0: 992})
    assert choose(Unified(), held, ranks) == (0, Reason.CACHE)
    assert choose(Unified(), replace(held, fetchable_tokens=992), ranks) == (1, Reason.LOAD)


def test_unified_when_fetching_is_slower_than_computing_then_it_counts_as_computing():
    quick = RankState(rank=0, prefill_tokens_per_s=100_000)
    assert Unified().expected_s(ask(fetchable_tokens=900), quick) == pytest.approx(0.01)


def test_unified_when_the_sessions_rank_is_not_much_worse_then_it_is_kept():
    ranks = [RankState(rank=0, pending_prefill_tokens=900), RankState(rank=1)]
    assert choose(Unified(), ask(session_rank=0), ranks) == (0, Reason.SESSION)
    ranks = [RankState(rank=0, pending_prefill_tokens=1_100), RankState(rank=1)]
    assert choose(Unified(), ask(session_rank=0), ranks) == (1, Reason.LOAD)


def test_hybrid_when_more_than_half_is_cached_then_load_does_not_matter():
    ranks = [RankState(rank=0, num_running=30), RankState(rank=1)]
    assert choose(Hybrid(), ask(cached_tokens={0: 512}), ranks) == (0, Reason.CACHE)
    assert choose(Hybrid(), ask(cached_tokens={0: 496}), ranks) == (1, Reason.LOAD)


def test_hybrid_when_scores_tie_then_the_fewer_requests_win():
    ranks = [RankState(rank=0, num_running=1), RankState(rank=1)]
    assert choose(Hybrid(), ask(cached_tokens={0: 1_000, 1: 1_000}), ranks) == (1, Reason.CACHE)


def test_dualpath_when_queues_differ_then_three_classes():
    policy = DualPath(beta_tokens=100, alpha_tokens=10)
    over = RankState(rank=0, ongoing_tokens=101)
    long = RankState(rank=1, read_queue_tokens=11)
    short = RankState(rank=2, ongoing_tokens=100, read_queue_tokens=10)
    assert choose(policy, ask(), [over, long, short]) == (2, Reason.SHORT_QUEUE)
    assert choose(policy, ask(), [over, long]) == (1, Reason.LONG_QUEUE)
    assert choose(policy, ask(), [over]) == (0, Reason.ALL_OVER)


def test_guard_when_a_difference_is_smaller_than_the_prompt_then_nobody_is_hot():
    ranks = [RankState(rank=0, ongoing_tokens=1_000), RankState(rank=1)]
    assert list(HotRankGuard().cool(ask(1_000), ranks)) == ranks
    assert list(HotRankGuard().cool(ask(992), ranks)) == ranks[1:]


def test_guard_when_only_the_busy_rank_has_the_prompt_then_it_is_not_hot_for_what_a_move_would_save():
    ranks = [RankState(rank=0, ongoing_tokens=4_000), RankState(rank=1)]
    assert list(HotRankGuard().cool(ask(960, cached_tokens={0: 944}), ranks)) == ranks
    assert list(HotRankGuard().cool(ask(960), ranks)) == ranks[1:], "nobody has it"
    assert list(HotRankGuard().cool(ask(960, cached_tokens={0: 944, 1: 944}), ranks)) == ranks[1:], "both have it"
    assert list(HotRankGuard().cool(ask(960, fetchable_tokens=944), ranks)) == ranks[1:], "the other can fetch it"
    much_more = [RankState(rank=0, ongoing_tokens=5_000), RankState(rank=1)]
    assert list(HotRankGuard().cool(ask(960, cached_tokens={0: 944}), much_more)) == much_more[1:]


@pytest.mark.parametrize(("factor", "num_ranks", "ongoing_tokens"), [(2.0, 4, -5_000), (1.0, 50, 2**59)])
def test_guard_when_numbers_leave_no_rank_then_none_is_hot(factor, num_ranks, ongoing_tokens):
    ranks = [RankState(rank=rank, ongoing_tokens=ongoing_tokens) for rank in range(num_ranks)]
    assert list(HotRankGuard(factor).cool(ask(1), ranks)) == ranks


@pytest.mark.parametrize(("page_tokens", "ongoing_tokens"), [(1, 1_000), (16, 1_008), (64, 1_024)])
def test_guard_when_a_rank_still_counts_the_pages_of_the_same_prompt_then_it_is_not_hot(page_tokens, ongoing_tokens):
    guard = HotRankGuard(page_tokens=page_tokens)
    ranks = [RankState(rank=0, ongoing_tokens=ongoing_tokens), RankState(rank=1)]
    assert list(guard.cool(ask(1_000), ranks)) == ranks
    more = [RankState(rank=0, ongoing_tokens=ongoing_tokens + 1), RankState(rank=1)]
    assert list(guard.cool(ask(1_000), more)) == more[1:]
