# SPDX-License-Identifier: Apache-2.0
"""Sessions played on a pool and an arena, with the rule for answers and without it."""

from __future__ import annotations

import random

import pytest

from banyan.planner.answer_reuse import LEAST_JUDGED, Answers
from banyan_lab.replay import Trace, TraceRequest
from benchmark import left_out_answers
from benchmark.left_out_answers import Pages, Work, found_share, in_turn, runs_of, turns_of

BLOCK_TOKENS = 64
ROUNDS = 2 * LEAST_JUDGED


def session(name: str, num_turns: int = ROUNDS) -> list[TraceRequest]:
    """Each prompt goes on from the one before by a block, and its answer has half a block."""
    return [
        TraceRequest(
            name,
            turn,
            float(turn),
            (turn + 1) * BLOCK_TOKENS,
            BLOCK_TOKENS // 2,
            blocks=((0, turn + 1),),
            scope=name,
        )
        for turn in range(num_turns)
    ]


def turns(answers: str) -> tuple[list[left_out_answers.Turn], int]:
    rng, pages = random.Random(0), Pages()
    sessions = [turns_of(session(name), BLOCK_TOKENS, answers, pages, rng) for name in "abcd"]
    return list(in_turn(sessions, 4, rng)), pages.num_pages


def test_turns_of_when_answers_are_kept_then_prompts_go_on_from_them():
    pages = Pages()
    requests = [TraceRequest("a", turn, 0.0, (1 + 2 * turn) * 64, 70, ((0, 1 + 2 * turn),)) for turn in range(3)]
    first, second, last = turns_of(requests, BLOCK_TOKENS, "kept", pages, random.Random(0))
    assert second.prompt[: len(first.prompt + first.answer)] == first.prompt + first.answer
    assert len(second.answer) == 1 and last.answer == []


def test_turns_of_when_answers_are_left_out_then_no_prompt_has_a_page_of_them():
    played, _ = turns("left out")
    asked = {page for turn in played for page in turn.prompt}
    assert all(turn.answer and asked.isdisjoint(turn.answer) for turn in played)


def test_pages_when_scopes_differ_then_equal_blocks_are_two_pages():
    pages = Pages()
    one, other = (pages.of_prompt(session(name, 1)[0], BLOCK_TOKENS) for name in "ab")
    assert one != other and pages.of_prompt(session("a", 1)[0], BLOCK_TOKENS) == one


def test_found_share_when_answers_are_left_out_then_the_rule_finds_more_and_elsewhere_the_same():
    left_out, _ = turns("left out")
    size = 4 * ROUNDS + 40
    assert found_share(left_out, size, Answers()) > found_share(left_out, size, None)
    kept, _ = turns("kept")
    for size in (40, 4 * ROUNDS):
        assert found_share(kept, size, Answers()) == found_share(kept, size, None)


def test_found_share_when_there_is_room_for_all_then_only_first_computations_are_missed():
    played, num_pages = turns("left out")
    num_asked = sum(len(turn.prompt) for turn in played)
    num_distinct = len({page for turn in played for page in turn.prompt})
    assert found_share(played, 8 * num_pages, None) == pytest.approx(1 - num_distinct / num_asked)


def test_runs_of_when_a_trace_is_played_then_there_is_a_run_for_each_size_and_kind_of_answer():
    trace = Trace("t", BLOCK_TOKENS, tuple(session("a") + session("b")))
    runs = list(runs_of(trace, Work("t", 2, 2, 20), order=1))
    assert [(run["answers"], run["share"]) for run in runs] == [
        (answers, share) for answers in left_out_answers.ANSWERS for share in left_out_answers.SHARES
    ]
    assert {run["num_prompts"] for run in runs} == {40}
