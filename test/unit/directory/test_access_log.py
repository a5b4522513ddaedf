# SPDX-License-Identifier: Apache-2.0
"""What prompts of one rank asked for, as the others read it."""

from __future__ import annotations

import pytest
from test.unit.directory.rig import Rank, ids, keys

from banyan._native import RankTable, page_number, page_numbers
from banyan.telemetry import NodeReuse, PromptAnswer

NUM_WORDS = 1 << 13
"""Of a frame table's ring."""


@pytest.fixture
def rank_table():
    return RankTable.create(3)


@pytest.fixture
def ranks(rank_table):
    return [Rank(rank_table, slot) for slot in range(3)]


def numbers(*pages):
    return ids(page_numbers(keys(*pages)))


def logged(rank, *slots):
    """Prompt by prompt, without the marks."""
    return [[number & ~1 for number in ids(prompt)] for prompt in rank.peers.read_access_logs(list(slots))]


def test_number_when_of_one_key_then_as_of_many_and_its_lowest_bit_is_free():
    assert [page_number(key) for key in keys(1, 2)] == numbers(1, 2)
    assert all(number % 2 == 0 for number in numbers(*range(100)))
    with pytest.raises(ValueError, match="64 hex digits"):
        page_number("no key")


def test_heard_when_two_ranks_tell_then_each_prompt_once_and_those_of_the_slots_only(ranks):
    one, other, third = ranks
    one.frame_table.log_access(page_numbers(keys(1, 2)))
    one.frame_table.log_access(page_numbers(keys(3)))
    third.frame_table.log_access(page_numbers(keys(4)))
    assert logged(other, 0) == [numbers(1, 2), numbers(3)]
    assert logged(other, 0) == []
    assert logged(other, 0, 2) == [numbers(4)]
    assert logged(third, 0) == [numbers(1, 2), numbers(3)], "each peer reads for itself"


def test_heard_when_a_rank_comes_later_then_it_begins_with_what_is_remembered(rank_table):
    Rank(rank_table, 0).frame_table.log_access(page_numbers(keys(9)))
    one = Rank(rank_table, 1)
    one.frame_table.log_access(page_numbers(keys(1, 2)))
    assert logged(Rank(rank_table, 2), 0, 1) == [numbers(1, 2)]


def test_heard_when_more_was_told_than_is_remembered_then_the_latest(ranks):
    one, other, _ = ranks
    for turn in range(NUM_WORDS):
        one.frame_table.log_access(page_numbers(keys(turn, -1)))
    seen = logged(other, 0)
    assert len(seen) == NUM_WORDS // 2
    assert seen[-1] == numbers(NUM_WORDS - 1, -1)


def test_tell_when_a_prompt_is_very_long_then_its_beginning_is_told(ranks):
    one, other, _ = ranks
    one.frame_table.log_access(page_numbers(keys(*range(NUM_WORDS))))
    assert logged(other, 0) == [numbers(*range(NUM_WORDS // 2))]


def test_heard_when_an_answer_computed_more_pages_than_a_message_holds_then_the_share_that_it_computed_stays(ranks):
    one, other, _ = ranks
    answer = PromptAnswer(16 * NUM_WORDS, NUM_WORDS - 1, page_numbers(keys(*range(NUM_WORDS - 1))))
    reuse = NodeReuse(16, 2 * NUM_WORDS, 7, lambda: 0.0)
    for could_be_found in (0.0, 1 / 2):
        one.frame_table.log_access(answer.message())
        (message,) = other.peers.read_access_logs([0])
        reuse.answered(PromptAnswer.of(message))
        assert reuse.count(lambda times: 1.0)["hit_ceiling_15m"] == pytest.approx(could_be_found, abs=0.02)


def test_heard_when_the_teller_has_other_weights_then_nothing():
    rank_table = RankTable.create(2)
    one, other = Rank(rank_table, 0), Rank(rank_table, 1, namespace=b"m" * 32)
    one.frame_table.log_access(page_numbers(keys(1)))
    assert logged(other, 0) == []


def test_heard_when_a_rank_has_left_and_come_again_then_what_it_tells_now(rank_table, ranks):
    one, other, _ = ranks
    one.frame_table.log_access(page_numbers(keys(1)))
    assert logged(other, 0) == [numbers(1)]
    one.frame_table.close()
    assert logged(other, 0) == []
    del one.peers
    again = Rank(rank_table, 0)
    again.frame_table.log_access(page_numbers(keys(2)))
    assert logged(other, 0) == [numbers(2)]


def test_tell_when_bytes_are_no_numbers_then_refused(ranks):
    with pytest.raises(ValueError, match="64 bits"):
        ranks[0].frame_table.log_access(b"abc")


def test_tell_when_the_frame_table_is_closed_then_nobody_hears_it(ranks):
    """A rank that could not join again goes on to serve, and asks with every request."""
    ranks[0].frame_table.close()
    ranks[0].frame_table.log_access(page_numbers(keys(1)))
    assert logged(ranks[1], 0) == []
