# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.routing.hint import PrefixHint


@pytest.mark.parametrize(
    ("pages_by_rank", "expected"),
    [([], PrefixHint(0, -1)), ([0, 0], PrefixHint(0, -1)), ([3, 7, 7], PrefixHint(112, 1)), ([9], PrefixHint(144, 0))],
)
def test_hint_when_ranks_hold_prefixes_then_the_longest_and_its_first_holder(pages_by_rank, expected):
    assert PrefixHint.from_pages_by_rank(pages_by_rank, 16) == expected


def test_payload_when_it_crosses_a_process_border_then_it_is_read_back():
    seen = PrefixHint(160, 3)
    assert PrefixHint.from_payload(seen.payload()) == seen


@pytest.mark.parametrize(
    "payload", [{}, {"dp_max_kv_len": "1", "dp_max_kv_rank": 0}, {"dp_max_kv_len": -1, "dp_max_kv_rank": 0}]
)
def test_payload_when_it_is_not_ours_then_none(payload):
    assert PrefixHint.from_payload(payload) is None
