# SPDX-License-Identifier: Apache-2.0
"""Decisions that only the simulator takes, on situations that a reader can check by hand."""

import pytest

from banyan.routing import Choice, Query, Reason, SeededTieBreaks
from banyan.routing.policies import DualPath
from banyan_lab.sim.source_rules import DecodeState, decode_rank, group_policy, is_held_back, is_read_by_decode


def ask():
    return Query(turn=0, num_prompt_tokens=1_000)


@pytest.mark.parametrize(("prefill", "decode", "is_decodes"), [(5, 4, True), (4, 4, False), (0, 9, False)])
def test_side_when_queues_differ_then_the_shorter_one_reads(prefill, decode, is_decodes):
    assert is_read_by_decode(prefill_tokens=prefill, decode_tokens=decode) is is_decodes


def test_request_when_all_ranks_have_as_much_as_they_may_then_it_is_held_back():
    assert [reason for reason in Reason if is_held_back(Choice(0, reason))] == [Reason.ALL_OVER]


def test_group_when_it_has_more_ranks_than_nodes_then_it_may_have_as_much_as_all_of_these():
    wide = group_policy(DualPath(beta_tokens=100, alpha_tokens=10), num_ranks=16, num_nodes=2)
    assert (wide.beta_tokens, wide.alpha_tokens) == (1_600, 20)


def test_decode_rank_when_groups_differ_then_the_lighter_group_and_in_it_the_rank_with_room():
    groups = {
        0: [
            DecodeState(rank=0, ongoing_tokens=10, free_tokens=99),
            DecodeState(rank=1, ongoing_tokens=90, free_tokens=99),
        ],
        1: [
            DecodeState(rank=2, ongoing_tokens=30, free_tokens=9),
            DecodeState(rank=3, ongoing_tokens=40, free_tokens=50),
        ],
    }
    assert decode_rank(ask(), groups, 10, SeededTieBreaks()) == 3
    assert decode_rank(ask(), groups, 9, SeededTieBreaks()) == 2
