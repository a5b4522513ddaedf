# SPDX-License-Identifier: Apache-2.0
"""Decisions that only the simulator takes, on situations that a reader can check by hand."""

import pytest

from banyan.routing import Query, SeededTieBreaks
from banyan_lab.sim.source_rules import DecodeState, decode_rank, is_read_by_decode


def ask():
    return Query(turn=0, num_prompt_tokens=1_000)


@pytest.mark.parametrize(("prefill", "decode", "is_decodes"), [(5, 4, True), (4, 4, False), (0, 9, False)])
def test_side_when_queues_differ_then_the_shorter_one_reads(prefill, decode, is_decodes):
    assert is_read_by_decode(prefill_tokens=prefill, decode_tokens=decode) is is_decodes


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
