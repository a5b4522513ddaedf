# SPDX-License-Identifier: Apache-2.0
"""The gate of elastic prefill: every condition alone closes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from banyan.routing import Detour, Dispatcher, ElasticPrefill, LoadReport, Prompt, Query, RankState, SeededLots
from banyan.routing.lmetric import LMetric

LOTS = SeededLots(1)
GATE = ElasticPrefill(1_000)
QUERY = Query(turn=3, num_prompt_tokens=5_000, cached_tokens={0: 1_000}, fetchable_tokens=1_000, session_rank=0)
HOME = RankState(rank=0, num_running=2, prefill_tokens_per_s=2_000.0)
IDLE = RankState(rank=1, prefill_tokens_per_s=1_000.0)


def test_detour_when_a_heavy_prompts_rank_is_busy_then_an_idle_rank_computes_it():
    assert GATE.detour(QUERY, [HOME, IDLE], LOTS) == Detour(1, 0, num_new_tokens=4_000, expected_s=4.0)


@pytest.mark.parametrize(
    ("query", "home", "idle"),
    [
        (replace(QUERY, session_rank=None), HOME, IDLE),
        (replace(QUERY, session_rank=7), HOME, IDLE),
        (replace(QUERY, fetchable_tokens=4_001), HOME, IDLE),
        (replace(QUERY, cached_tokens={1: 4_001}), HOME, IDLE),
        (QUERY, replace(HOME, num_running=0), IDLE),
        (QUERY, HOME, replace(IDLE, num_running=1)),
        (QUERY, HOME, replace(IDLE, num_waiting=1)),
        (QUERY, HOME, replace(IDLE, prefill_tokens_per_s=None)),
    ],
    ids=[
        "no session", "its rank is not a candidate", "light", "light on another rank", "nobody is spared",
        "the other decodes", "the other has a queue", "the other's speed is not known",
    ],
)  # fmt: skip
def test_detour_when_one_condition_fails_then_none(query, home, idle):
    assert GATE.detour(query, [home, idle], LOTS) is None


def test_detour_when_several_are_idle_then_the_one_that_holds_most():
    ranks = [HOME, IDLE, replace(IDLE, rank=2)]
    assert GATE.detour(replace(QUERY, cached_tokens={2: 16}), ranks, LOTS).prefill_rank == 2


@given(
    ranks=st.lists(
        st.builds(
            RankState,
            rank=st.just(0),
            num_running=st.integers(0, 1),
            num_waiting=st.integers(0, 1),
            prefill_tokens_per_s=st.sampled_from([None, 500.0]),
        ),
        max_size=5,
    ),
    cached=st.lists(st.sampled_from([0, 0, 512, 4_096]), min_size=5, max_size=5),
    session_rank=st.none() | st.integers(0, 5),
    order=st.permutations(range(5)),
    seed=st.integers(0, 99),
)
def test_detour_when_ranks_come_in_any_order_then_one_answer_between_two_candidates(
    ranks, cached, session_rank, order, seed
):
    ranks = [replace(state, rank=rank) for rank, state in enumerate(ranks)]
    query = Query(0, 5_000, dict(enumerate(cached)), fetchable_tokens=max(cached), session_rank=session_rank)
    detour = GATE.detour(query, ranks, SeededLots(seed))
    assert detour == GATE.detour(query, [ranks[place] for place in order if place < len(ranks)], SeededLots(seed))
    if detour is not None:
        assert detour.decode_rank == session_rank != detour.prefill_rank
        assert ranks[detour.prefill_rank].num_requests == 0 < ranks[detour.decode_rank].num_requests


@pytest.mark.parametrize("min_new_tokens", [0, -1])
def test_gate_when_it_would_let_everything_pass_then_it_is_refused(min_new_tokens):
    with pytest.raises(ValueError, match="at 1 new token or more"):
        ElasticPrefill(min_new_tokens)


def dispatcher_with_a_session_on_0() -> Dispatcher:
    dispatcher = Dispatcher(2, LMetric())
    dispatcher.count(Prompt(100, session="s"), 0, 1.0)
    for rank, num_running in ((0, 1), (1, 0)):
        dispatcher.reported(
            rank,
            LoadReport(2.0, num_running=num_running, total_prefill_tokens=1_000, total_prefill_us=1_000_000),
        )
    return dispatcher


def test_dispatcher_when_asked_for_a_detour_then_it_knows_the_session_and_counts_nothing():
    dispatcher = dispatcher_with_a_session_on_0()
    before = dispatcher.states((0, 1))
    assert dispatcher.detour(Prompt(2_000, session="s"), (0, 1), GATE) == Detour(1, 0, 2_000, 2.0)
    assert dispatcher.detour(Prompt(2_000, session="other"), (0, 1), GATE) is None
    assert dispatcher.states((0, 1)) == before


@pytest.mark.parametrize("active", [(0,), (1,)])
def test_dispatcher_when_one_of_both_is_inactive_then_no_detour(active):
    assert dispatcher_with_a_session_on_0().detour(Prompt(2_000, session="s"), active, GATE) is None


def test_dispatcher_when_the_sessions_rank_is_hot_then_no_detour_leads_there():
    dispatcher = dispatcher_with_a_session_on_0()
    dispatcher.reported(0, LoadReport(3.0, num_running=1, ongoing_tokens=2_001))
    assert dispatcher.detour(Prompt(2_000, session="s"), (0, 1), GATE) is None
