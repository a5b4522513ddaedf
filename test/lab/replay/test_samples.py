# SPDX-License-Identifier: Apache-2.0
"""Cutting, scaling, classing and pacing of traces."""

from __future__ import annotations

import pytest

from banyan_lab.replay import (
    Pace,
    RequestClass,
    Sampling,
    Scale,
    Skew,
    Trace,
    TraceRequest,
    class_of,
    sampled,
    scaled,
    sharing_of,
    skewed_trace,
)
from banyan_lab.replay.trace import runs_of


def ask(session, turn, at_s, *, tokens=64, blocks=(), think_s=None, scope="", out=8):
    return TraceRequest(session, turn, at_s, tokens, out, runs_of(blocks), scope, think_s)


def trace_of(*requests, block_tokens=16):
    return Trace("t", block_tokens, tuple(sorted(requests, key=lambda request: request.at_s)))


def test_runs_when_ids_follow_each_other_then_they_are_one():
    assert runs_of([3, 4, 5, 9, 8]) == ((3, 3), (9, 1), (8, 1))
    assert list(ask("a", 0, 0, blocks=[3, 4, 5, 9]).block_ids()) == [3, 4, 5, 9]


def test_sharing_when_blocks_come_back_then_only_leading_ones_count():
    trace = trace_of(
        ask("a", 0, 0.0, blocks=[1, 2, 3, 4]),
        ask("a", 1, 1.0, blocks=[1, 2, 9, 4]),
        ask("b", 0, 2.0, blocks=[1, 2, 9, 4]),
        ask("c", 0, 3.0, blocks=[1, 2, 9, 4], scope="other"),
    )
    sharing = sharing_of(trace)
    assert sharing.new_tokens == (64, 32, 1, 64)
    assert sharing.shared_ratio == pytest.approx(1 - 161 / 256)


def test_window_when_cut_then_turns_are_counted_anew_and_the_first_has_no_think_time():
    trace = trace_of(*(ask("a", turn, 10.0 * turn, think_s=5.0 if turn else None) for turn in range(6)))
    sample, report = sampled(trace, Sampling(window_s=25.0, start_s=15.0))
    assert [(r.turn, r.at_s, r.think_s) for r in sample.requests] == [(0, 0.0, None), (1, 10.0, 5.0)]
    assert (report.start_s, report.num_window_requests, report.num_sessions) == (15.0, 2, 1)


def test_window_when_its_start_is_drawn_then_the_seed_decides_and_it_fits():
    trace = trace_of(*(ask(f"s{n}", 0, float(n)) for n in range(100)))
    starts = [sampled(trace, Sampling(window_s=30.0, seed=seed))[1].start_s for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]
    assert all(0 <= start <= 69 for start in starts)


def test_thinning_when_sessions_are_drawn_then_whole_ones_are_kept():
    trace = trace_of(*(ask(f"s{n}", turn, n + turn / 8) for n in range(40) for turn in range(4)))
    sample, report = sampled(trace, Sampling(sample_ratio=0.25, seed=3))
    assert report.num_sessions == 10
    assert all(len(requests) == 4 for requests in sample.sessions().values())


@pytest.mark.parametrize(("max_ratio", "num_singles"), [(1.0, 30), (0.5, 10), (0.0, 0)])
def test_thinning_when_single_turns_abound_then_they_are_limited(max_ratio, num_singles):
    singles = [ask(f"one{n}", 0, float(n)) for n in range(30)]
    others = [ask(f"two{n}", turn, n + turn / 2) for n in range(10) for turn in range(2)]
    sample, _ = sampled(trace_of(*singles, *others), Sampling(max_single_turn_ratio=max_ratio))
    kept = sample.sessions()
    assert sum(len(requests) == 1 for requests in kept.values()) == num_singles
    assert sum(len(requests) == 2 for requests in kept.values()) == 10


def test_report_when_thinning_tears_sessions_apart_from_what_they_share_then_it_says_so():
    # Pairs of sessions share a prefix: half of them gone, half of the sharing is.
    trace = trace_of(*(ask(f"s{n}", 0, float(n), blocks=[10 * (n // 2), 10 * (n // 2) + 1]) for n in range(200)))
    _, whole = sampled(trace, Sampling())
    _, half = sampled(trace, Sampling(sample_ratio=0.5, seed=1))
    assert whole.survived_ratio == 1.0
    assert half.survived_ratio == pytest.approx(0.5, abs=0.15)


def test_cut_when_limited_then_the_earliest_requests_stay():
    trace = trace_of(*(ask(f"s{n}", 0, float(n)) for n in range(9)))
    assert [r.session for r in sampled(trace, Sampling(num_requests=3))[0].requests] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(
    "wrong", [{"window_s": 0}, {"sample_ratio": 0}, {"sample_ratio": 1.1}, {"max_single_turn_ratio": -1}]
)
def test_cut_when_it_makes_no_sense_then_refused(wrong):
    with pytest.raises(ValueError, match="--"):
        Sampling(**wrong)


def test_scale_when_blocks_shrink_then_prompts_shrink_by_the_same_factor_and_share_as_before():
    trace = trace_of(
        ask("a", 0, 0.0, tokens=5_120, blocks=range(10)),
        ask("a", 1, 1.0, tokens=6_144, blocks=range(12)),
        block_tokens=512,
    )
    small, factor, num_dropped = scaled(trace, Scale(tokens=0.06, output_tokens=0.5, max_output_tokens=3))
    assert (small.block_tokens, factor, num_dropped) == (31, 31 / 512, 0)
    assert [r.num_input_tokens for r in small.requests] == [310, 372]
    assert [r.num_output_tokens for r in small.requests] == [3, 3]
    assert sharing_of(small).shared_ratio == pytest.approx(sharing_of(trace).shared_ratio, abs=1e-3)


def test_scale_when_a_prompt_is_too_long_then_its_session_ends_there():
    lengths = {"a": [10, 90, 20], "b": [50]}
    trace = trace_of(
        *(ask(name, turn, float(turn), tokens=n) for name, ns in lengths.items() for turn, n in enumerate(ns))
    )
    small, _, num_dropped = scaled(trace, Scale(max_input_tokens=64))
    assert {name: len(requests) for name, requests in small.sessions().items()} == {"a": 1, "b": 1}
    assert num_dropped == 2


@pytest.mark.parametrize(
    ("tokens", "scale", "expected"),
    [
        (4_999, 1.0, "warm"),
        (5_000, 1.0, "medium"),
        (20_001, 1.0, "heavy"),
        (320, 1 / 16, "medium"),
        (10, 1e-3, "medium"),
    ],
)
def test_class_when_new_tokens_are_counted_then_by_the_scaled_limits(tokens, scale, expected):
    assert class_of(tokens, token_scale=scale) is RequestClass(expected)


def test_pace_when_a_turn_follows_then_it_waits_for_the_answer_and_the_user():
    pace = Pace(time_scale=0.5)
    assert pace.send_s(ask("a", 0, 30.0), None) == 15.0
    assert pace.send_s(ask("a", 1, 30.0), 4.0) == 15.0
    assert pace.send_s(ask("a", 1, 30.0), 40.0) == 40.0
    assert pace.send_s(ask("a", 1, 30.0, think_s=6.0), 40.0) == 43.0


@pytest.mark.parametrize("wrong", [{"time_scale": 0}, {"max_inflight_sessions": 0}])
def test_pace_when_it_makes_no_sense_then_refused(wrong):
    with pytest.raises(ValueError, match="--"):
        Pace(**wrong)


def test_skewed_when_generated_then_one_prefix_takes_most_and_the_seed_decides():
    shape = Skew(num_sessions=200, hot_ratio=0.8)
    trace = skewed_trace(shape, seed=5)
    hot = sum(1 for requests in trace.sessions().values() if requests[0].blocks[0][0] == 0)
    assert 145 <= hot <= 175
    assert trace == skewed_trace(shape, seed=5) != skewed_trace(shape, seed=6)
    assert [r.at_s for r in trace.requests] == sorted(r.at_s for r in trace.requests)
    second = next(r for r in trace.requests if r.turn == 1)
    first = trace.sessions()[second.session][0]
    assert list(second.block_ids())[: len(list(first.block_ids()))] == list(first.block_ids())
