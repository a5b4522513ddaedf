# SPDX-License-Identifier: Apache-2.0
"""The books around a policy: what counts until when, sessions, turns."""

from __future__ import annotations

import tracemalloc

import pytest

from banyan.routing import Dispatcher, HotRankGuard, LoadReport, NoActiveRank, Prompt, Reason
from banyan.routing.dispatcher import MAX_SESSIONS
from banyan.routing.policies import LMetric, RoundRobin, SessionSticky
from banyan.routing.view import RankState

BOTH = (0, 1)


def test_states_when_requests_are_on_their_way_then_they_count_on_top_of_the_report():
    dispatcher = Dispatcher(2, RoundRobin())
    report = LoadReport(taken_s=10.0, num_running=1, num_waiting=2, pending_prefill_tokens=300, ongoing_tokens=1_000)
    dispatcher.reported(0, report)
    dispatcher.count(Prompt(500, cached_tokens=(160, 0)), 0, 10.5)
    assert dispatcher.states({0}) == [
        RankState(
            rank=0,
            num_running=1,
            num_waiting=3,
            pending_prefill_tokens=640,
            ongoing_tokens=1_500,
            last_turn=0,
        ),
    ]


def test_place_when_a_rank_is_out_of_reach_then_it_computes_what_others_can_fetch():
    prompt = Prompt(1_000, cached_tokens=(800, 0, 0), fetchable_tokens=800)
    for out_of_reach, pending in (((), 200), ((2,), 1_000)):
        dispatcher = Dispatcher(3, RoundRobin(), out_of_reach=out_of_reach)
        dispatcher.count(prompt, 2, 1.0)
        assert dispatcher.states({2})[0].pending_prefill_tokens == pending
        dispatcher.count(prompt, 1, 1.0)
        assert dispatcher.states({1})[0].pending_prefill_tokens == 200


def test_states_when_a_later_report_comes_then_what_was_sent_before_it_is_in_it():
    dispatcher = Dispatcher(1, RoundRobin())
    dispatcher.count(Prompt(100), 0, 10.0)
    dispatcher.count(Prompt(200), 0, 12.0)
    dispatcher.reported(0, LoadReport(taken_s=9.0))
    assert dispatcher.states({0})[0].ongoing_tokens == 300
    dispatcher.reported(0, LoadReport(taken_s=11.0, num_waiting=1, ongoing_tokens=100))
    (state,) = dispatcher.states({0})
    assert (state.num_waiting, state.ongoing_tokens) == (2, 300)
    dispatcher.reported(0, LoadReport(taken_s=10.5))
    assert dispatcher.states({0}) == [state], "an older report came late"
    dispatcher.reported(0, LoadReport(taken_s=13.0))
    assert dispatcher.states({0})[0].num_requests == 0


def test_states_when_a_rank_waits_for_reads_then_the_latest_word_counts_and_reports_do_not_say_it():
    dispatcher = Dispatcher(1, RoundRobin())
    dispatcher.waits_for_reads(0, 48)
    dispatcher.reported(0, LoadReport(taken_s=10.0))
    assert dispatcher.states({0})[0].read_queue_tokens == 48
    dispatcher.waits_for_reads(0, 16)
    dispatcher.waits_for_reads(1, 16)
    assert [state.read_queue_tokens for state in dispatcher.states({0})] == [16], "of ranks that are known"


def test_ended_when_no_report_counts_the_request_yet_then_it_counts_no_more():
    dispatcher = Dispatcher(1, RoundRobin())
    dispatcher.count(Prompt(100), 0, 10.0)
    dispatcher.count(Prompt(200), 0, 11.0)
    dispatcher.ended(0, 200, 11.0)
    (state,) = dispatcher.states({0})
    assert (state.num_waiting, state.ongoing_tokens, state.pending_prefill_tokens) == (1, 100, 100)


def test_ended_when_a_report_counts_the_request_then_the_next_report_tells():
    dispatcher = Dispatcher(1, RoundRobin())
    dispatcher.count(Prompt(100), 0, 10.0)
    dispatcher.reported(0, LoadReport(taken_s=11.0, num_running=1))
    dispatcher.ended(0, 100, 10.0)
    assert dispatcher.states({0})[0].num_requests == 1


def test_rank_when_it_is_taken_out_and_comes_back_then_nothing_of_before_is_on_its_way_there():
    dispatcher = Dispatcher(2, RoundRobin())
    for rank in (0, 1):
        dispatcher.count(Prompt(100), rank, 10.0)
    dispatcher.forget_all_but({0})
    assert dispatcher.unheard_s(50.0) == {0: 40.0}
    assert [state.num_requests for state in dispatcher.states({0, 1})] == [1, 0]


def test_states_when_a_report_says_until_when_it_received_then_what_was_sent_later_counts_on_top():
    dispatcher = Dispatcher(1, RoundRobin())
    dispatcher.count(Prompt(100), 0, 10.0)
    dispatcher.count(Prompt(200), 0, 12.0)
    dispatcher.reported(0, LoadReport(taken_s=13.0, received_s=11.0, num_running=1))
    assert dispatcher.states({0})[0].num_requests == 2


def test_states_when_peers_can_give_the_prefix_then_it_is_not_pending():
    dispatcher = Dispatcher(2, RoundRobin())
    dispatcher.count(Prompt(500, cached_tokens=(160, 0), fetchable_tokens=160), 1, 0.0)
    assert dispatcher.states({1})[0].pending_prefill_tokens == 340


def test_place_when_a_burst_comes_between_two_reports_then_it_is_spread():
    dispatcher = Dispatcher(2, LMetric())
    ranks = [dispatcher.place(Prompt(100), BOTH, now_s).rank for now_s in range(8)]
    assert sorted(ranks) == [0] * 4 + [1] * 4


def test_place_when_a_session_comes_back_then_where_it_was():
    dispatcher = Dispatcher(2, SessionSticky())
    first = dispatcher.place(Prompt(100, session="a"), BOTH, 0.0)
    dispatcher.place(Prompt(100, session="b"), BOTH, 0.0)
    again = dispatcher.place(Prompt(100, session="a"), BOTH, 0.0)
    assert (first.reason, again.reason) == (Reason.LOAD, Reason.SESSION)
    assert again.rank == first.rank


def test_place_when_a_session_was_pinned_elsewhere_then_it_follows():
    dispatcher = Dispatcher(2, SessionSticky(), guard=HotRankGuard(float("inf")))
    rank = dispatcher.place(Prompt(100, session="a"), BOTH, 0.0).rank
    dispatcher.count(Prompt(100, session="a"), 1 - rank, 0.0)
    assert dispatcher.place(Prompt(100, session="a"), BOTH, 0.0).rank == 1 - rank


def test_sessions_when_their_names_are_long_then_they_take_no_more_memory():
    dispatcher = Dispatcher(2, SessionSticky())
    tracemalloc.start()
    try:
        for number in range(40):
            dispatcher.count(Prompt(1, session=f"{number}{'x' * 1_000_000}"), 0, 0.0)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 100_000
    assert dispatcher.place(Prompt(1, session="7" + "x" * 1_000_000), {0}, 0.0).reason is Reason.SESSION
    assert dispatcher.place(Prompt(1, session="7" + "x" * 999_999), {0}, 0.0).reason is Reason.LOAD


def test_session_when_its_name_is_no_text_then_it_is_remembered_all_the_same():
    dispatcher = Dispatcher(2, SessionSticky())
    dispatcher.count(Prompt(1, session="\ud800"), 1, 0.0)
    assert dispatcher.place(Prompt(1, session="\ud800"), BOTH, 0.0).rank == 1


def test_sessions_when_there_are_too_many_then_the_oldest_is_forgotten():
    dispatcher = Dispatcher(1, SessionSticky())
    for number in range(MAX_SESSIONS + 1):
        dispatcher.count(Prompt(1, session=str(number)), 0, 0.0)
    assert dispatcher.place(Prompt(1, session="0"), {0}, 0.0).reason is Reason.LOAD
    assert dispatcher.place(Prompt(1, session=str(MAX_SESSIONS)), {0}, 0.0).reason is Reason.SESSION


def test_place_when_another_policy_is_named_then_it_stands_in_once():
    dispatcher = Dispatcher(2, LMetric())
    assert dispatcher.place(Prompt(9), BOTH, 0.0, policy=RoundRobin()).reason is Reason.TURN
    assert dispatcher.place(Prompt(9), BOTH, 0.0).reason is Reason.LOAD


def test_place_when_nobody_is_active_then_nothing_is_counted():
    dispatcher = Dispatcher(1, LMetric())
    with pytest.raises(NoActiveRank):
        dispatcher.place(Prompt(9, session="a"), (), 0.0)
    assert dispatcher.states({0}) == [RankState(rank=0)]


def test_reported_when_a_rank_joins_later_then_it_is_a_candidate():
    dispatcher = Dispatcher(1, LMetric())
    dispatcher.reported(2, LoadReport(taken_s=1.0))
    assert dispatcher.place(Prompt(9), {2}, 2.0).rank == 2


def test_report_when_nothing_was_prefilled_then_the_rate_is_unknown():
    assert LoadReport().prefill_tokens_per_s is None
    assert LoadReport(total_prefill_tokens=500, total_prefill_us=250_000).prefill_tokens_per_s == 2_000
