# SPDX-License-Identifier: Apache-2.0
"""How much is kept free: enough for a step while the last one's pages come, and no more than a share of the pool."""

import pytest

from banyan.sglang_plugin.pools.reserve import Reserve, reserve_for

LIMITS = {"max_prefill_tokens": 16384, "page_tokens": 16}


@pytest.mark.parametrize(
    ("limits", "step_tokens"),
    [
        ({"chunked_prefill_tokens": 8192, "max_running_requests": 64, "pool_tokens": 1 << 20}, 8192),
        ({"chunked_prefill_tokens": 512, "max_running_requests": 64, "pool_tokens": 1 << 20}, 1024),
        ({"chunked_prefill_tokens": -1, "max_running_requests": 64, "pool_tokens": 1 << 20}, 16384),
        ({"chunked_prefill_tokens": None, "max_running_requests": None, "pool_tokens": 1 << 20}, 16384),
        ({"chunked_prefill_tokens": 8192, "max_running_requests": 64, "pool_tokens": 65536}, 4096),
    ],
    ids=["a chunk", "a decode batch", "whole prompts", "nothing said", "a small pool"],
)
def test_reserve_when_the_server_has_these_limits_then_it_covers_the_largest_forward(limits, step_tokens):
    assert reserve_for(**LIMITS, **limits) == Reserve(step_tokens)


def test_tokens_when_enough_is_free_then_nothing_more_is_evicted():
    assert Reserve(100).tokens_to_have(50, available=150) == 50


def test_tokens_when_less_than_a_step_would_be_left_then_two_are_made_free():
    assert Reserve(100).tokens_to_have(50, available=149) == 250
