# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.routing.reads import (
    DETOUR_S,
    LEAST_PART_TOKENS,
    ReadQueue,
    decode_part,
    split_read,
)


@pytest.mark.parametrize(
    ("prefill", "decode", "part"), [(0, 0, 500), (0, 400, 300), (400, 0, 700), (0, 1_000, 0), (9_000, 0, 1_000)]
)
def test_split_when_rates_are_alike_then_both_queues_end_together(prefill, decode, part):
    assert split_read(1_000, prefill=ReadQueue(prefill), decode=ReadQueue(decode)) == part
    assert split_read(1_000, prefill=ReadQueue(prefill, 7.0), decode=ReadQueue(decode, 7.0)) == part


def test_part_when_both_read_fast_then_the_detour_is_not_worth_it():
    fast = ReadQueue(0, 2_000 / DETOUR_S)
    assert decode_part(2_000, prefill=fast, decode=fast) == 0


def test_part_when_both_read_slowly_then_half_each():
    slow = ReadQueue(0, 1_000.0)
    assert decode_part(2_000, prefill=slow, decode=slow) == 1_000 - DETOUR_S * 1_000 / 2


def test_part_when_only_prefill_reads_slowly_then_decode_reads_all():
    assert decode_part(2_000, prefill=ReadQueue(0, 900.0), decode=ReadQueue(0, 60_000.0)) == 2_000


def test_part_when_a_rate_is_not_known_then_both_are_measured():
    assert decode_part(2_000, prefill=ReadQueue(0, 900.0), decode=ReadQueue()) == 1_000


def test_part_when_decode_would_read_for_long_then_it_reads_what_it_is_waited_for():
    slow = ReadQueue(0, 1_000.0)
    assert decode_part(40_000, prefill=slow, decode=slow) == 5_000
    assert decode_part(40_000, prefill=slow, decode=ReadQueue(4_000, 1_000.0)) == 1_000
    assert decode_part(40_000, prefill=slow, decode=ReadQueue(4_900, 1_000.0)) == 0


@pytest.mark.parametrize(("num_tokens", "queue", "part"), [(511, 0, 0), (512, 0, 256), (511, 300, 511), (1, 0, 0)])
def test_part_when_a_half_is_short_then_one_side_reads_all(num_tokens, queue, part):
    assert LEAST_PART_TOKENS == 256
    assert decode_part(num_tokens, prefill=ReadQueue(queue), decode=ReadQueue()) == part


@pytest.mark.parametrize(("most", "part"), [(5_000, 2_000), (1_900, 1_744), (900, 900), (255, 0), (0, 0)])
def test_part_when_decode_takes_no_more_for_one_request_then_prefill_reads_the_rest(most, part):
    fast = ReadQueue(0, 60_000.0, most)
    assert decode_part(2_000, prefill=ReadQueue(0, 900.0), decode=fast) == part
    assert decode_part(2_000, prefill=ReadQueue(9_000), decode=ReadQueue(most_tokens=most)) == part
