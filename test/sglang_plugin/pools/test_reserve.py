# SPDX-License-Identifier: Apache-2.0
"""How much is kept free: enough for a step while the last one's pages come, and no more than a share of the pool."""

import pytest

from banyan.sglang_plugin.pools.reserve import NUM_ASKED, NUM_LOADS, Recent, Reserve, reserve_for

LLAMA_ON_H100, DEEPSEEK_RANK = 400_000, 450_000
"""Tokens of a pool: 8B in bf16, and V3 on one of eight GPUs."""


@pytest.mark.parametrize(
    ("chunk", "running", "page_tokens", "pool_tokens", "share"),
    [(8192, 64, 16, LLAMA_ON_H100, 0.042), (1024, 16, 64, DEEPSEEK_RANK, 0.006), (8192, 64, 128, LLAMA_ON_H100, 0.042)],
    ids=["8B", "DeepSeek, attention DP of 8", "pages of 128"],
)
def test_reserve_when_a_server_decodes_and_prefills_then_two_steps_of_what_it_runs_lie_empty(
    chunk, running, page_tokens, pool_tokens, share
):
    reserve = reserve_for(chunked_prefill_tokens=chunk, max_prefill_tokens=16384, pool_tokens=pool_tokens)
    for _ in range(NUM_ASKED):
        reserve.tokens_to_have(running * page_tokens, available=pool_tokens)
    reserve.tokens_to_have(chunk, available=pool_tokens)
    assert 2 * reserve.step_tokens / pool_tokens < share


@pytest.mark.parametrize(
    ("limits", "step_tokens"),
    [
        ({"chunked_prefill_tokens": 8192, "pool_tokens": 1 << 20}, 8192),
        ({"chunked_prefill_tokens": -1, "pool_tokens": 1 << 20}, 16384),
        ({"chunked_prefill_tokens": None, "pool_tokens": 1 << 20}, 16384),
        ({"chunked_prefill_tokens": 8192, "pool_tokens": 65536}, 4096),
    ],
    ids=["a chunk", "whole prompts", "nothing said", "a small pool"],
)
def test_reserve_when_nothing_has_come_yet_then_it_covers_a_chunk(limits, step_tokens):
    assert reserve_for(max_prefill_tokens=16384, **limits).step_tokens == step_tokens


def test_reserve_when_a_long_prefix_was_fetched_then_the_next_one_finds_room_until_others_have_come():
    reserve = Reserve(100, most_tokens=10_000)
    reserve.loaded(5_000)
    for _ in range(10 * NUM_ASKED):
        assert reserve.tokens_to_have(16, available=5_000) == 16 + 2 * 5_000, "forwards do not make it forget"
    for _ in range(2 * NUM_LOADS):
        reserve.loaded(200)
    assert reserve.step_tokens == 200


def test_reserve_when_a_fetch_is_larger_than_its_share_of_the_pool_then_the_share():
    reserve = Reserve(100, most_tokens=1_000)
    reserve.loaded(5_000)
    assert reserve.step_tokens == 1_000


def test_recent_when_numbers_fall_then_the_largest_is_forgotten_after_twice_as_many():
    recent = Recent(4)
    recent.note(9)
    for _ in range(7):
        assert recent.largest == 9
        recent.note(1)
    recent.note(1)
    assert recent.largest == 1


def test_tokens_when_enough_is_free_then_nothing_more_is_evicted():
    assert Reserve(100).tokens_to_have(50, available=150) == 50


def test_tokens_when_less_than_a_step_would_be_left_then_two_are_made_free():
    assert Reserve(100).tokens_to_have(50, available=149) == 250
