# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.layout import cacheable_tokens


@pytest.mark.parametrize(
    ("num_tokens", "page_tokens", "expected"),
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (32, 16, 16), (33, 1, 32)],
)
def test_cacheable_tokens_when_a_prompt_ends_at_a_page_or_not_then_its_last_token_is_left_to_compute(
    num_tokens, page_tokens, expected
):
    assert cacheable_tokens(num_tokens, page_tokens) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (17, 0), (18, 16), (33, 16), (34, 32)])
def test_cacheable_tokens_when_keys_look_ahead_then_a_page_takes_the_token_behind_it(num_tokens, expected):
    assert cacheable_tokens(num_tokens, 16, 1) == expected
