# SPDX-License-Identifier: Apache-2.0
"""What holds for every division of a read between the two sides of a pair."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from banyan.routing.reads import (
    LEAST_PART_TOKENS,
    MOST_PART_S,
    ReadQueue,
    decode_part,
    split_read,
)

tokens = st.integers(0, 200_000)
rates = st.sampled_from([1.0, 870.0, 43_000.0, 1e6])
measured = st.builds(ReadQueue, tokens, rates)
queues = measured | st.builds(ReadQueue, tokens)
detours = st.sampled_from([0.0, 0.05, 1.0])


@given(tokens, queues, queues, detours)
def test_split_when_it_is_made_then_no_side_reads_less_than_nothing_or_more_than_all(num_tokens, near, far, detour_s):
    assert 0 <= split_read(num_tokens, prefill=near, decode=far, detour_s=detour_s) <= num_tokens
    part = decode_part(num_tokens, prefill=near, decode=far)
    assert part in (0, num_tokens) or part >= LEAST_PART_TOKENS
    if far.tokens_per_s and part:
        assert (far.num_tokens + part) / far.tokens_per_s <= MOST_PART_S


@given(tokens, queues, queues, tokens)
def test_split_when_a_queue_grows_then_that_side_reads_no_more(num_tokens, near, far, more):
    part = split_read(num_tokens, prefill=near, decode=far)
    longer = replace(near, num_tokens=near.num_tokens + more), replace(far, num_tokens=far.num_tokens + more)
    assert split_read(num_tokens, prefill=longer[0], decode=far) >= part
    assert split_read(num_tokens, prefill=near, decode=longer[1]) <= part


def end_s(num_tokens, part, near, far, detour_s):
    """When the last of ``num_tokens`` is read, of which decode reads ``part``."""
    near_s = (near.num_tokens + num_tokens - part) / near.tokens_per_s if part < num_tokens else 0.0
    return max(near_s, (far.num_tokens + part) / far.tokens_per_s + detour_s if part else 0.0)


@given(tokens, st.integers(0, 100), measured, measured, detours)
def test_split_when_it_is_made_then_no_other_ends_earlier(num_tokens, percent, near, far, detour_s):
    part = split_read(num_tokens, prefill=near, decode=far, detour_s=detour_s)
    found_s = end_s(num_tokens, part, near, far, detour_s)
    a_token_s = 1 / near.tokens_per_s + 1 / far.tokens_per_s
    other_s = end_s(num_tokens, num_tokens * percent // 100, near, far, detour_s)
    assert found_s <= other_s * (1 + 1e-9) + a_token_s
