# SPDX-License-Identifier: Apache-2.0
"""What ``make gpu-check`` calls the same tokens."""

from types import SimpleNamespace

import pytest
from test.gpu.comparison import Comparison, compare, divergence, is_near, more_verified


def answer(prompt, num_cached_tokens, tokens):
    return SimpleNamespace(prompt=tuple(prompt), num_cached_tokens=num_cached_tokens, tokens=tokens)


REFERENCE = [answer([1, 2], 0, [7]), answer([1, 2], 16, [8]), answer([3], 0, [9])]


def test_compare_when_the_cached_prefix_is_the_same_then_the_tokens_count():
    answers = [answer([1, 2], 0, [7]), answer([1, 2], 16, [7])]
    assert compare(REFERENCE, answers) == Comparison(num_equal=1, num_different=1, num_other=0)


def test_compare_when_the_cached_prefix_is_another_then_neither_equal_nor_different():
    found = compare(REFERENCE, [answer([1, 2], 32, [7]), answer([4], 0, [7]), answer([3], 0, [9])])
    assert found == Comparison(num_equal=1, num_different=0, num_other=2)
    assert found.share_compared == pytest.approx(1 / 3)


def test_compare_when_there_is_nothing_then_nothing_was_compared():
    assert compare(REFERENCE, []).share_compared == 0


def test_divergence_when_the_same_then_zero_and_else_above():
    assert divergence([-1.0, -2.0], [-1.0, -2.0]) == 0
    assert divergence([-1.0, -2.0], [-1.1, -1.9]) == pytest.approx(0.005, rel=0.01)


@pytest.mark.parametrize(("reference", "scored"), [([], []), ([-1.0], [-1.0, -2.0])])
def test_divergence_when_tokens_are_missing_then_valueerror(reference, scored):
    with pytest.raises(ValueError, match="log-probabilities"):
        divergence(reference, scored)


@pytest.mark.parametrize(("ours", "stocks", "expected"), [(2e-3, 1e-3, True), (3e-3, 1e-3, False), (9e-6, 0, True)])
def test_hit_when_it_is_as_near_as_stocks_then_so_up_to_noise(ours, stocks, expected):
    assert is_near(ours, stocks) is expected


def drafted(prompt, num_verified, **cached):
    return SimpleNamespace(prompt=(prompt,), num_cached_tokens=16, num_verified=num_verified, cached=cached)


def test_drafts_when_fewer_are_accepted_behind_fetched_pages_then_more_forwards_verify():
    off = [drafted(1, 4), drafted(2, 6)]
    assert more_verified(off, [drafted(1, 4, peer=16), drafted(2, 6, host=16)]) == 1.0
    assert more_verified(off, [drafted(1, 8, peer=16), drafted(2, 12, storage=16)]) == 2.0
    # What was not fetched, or has no counterpart, says nothing of fetched pages.
    assert more_verified(off, [drafted(1, 99, device=16), drafted(3, 99, peer=16), drafted(2, 9, peer=16)]) == 1.5


def test_drafts_when_nothing_was_drafted_then_nothing_is_fewer():
    assert more_verified([drafted(1, 0)], [drafted(1, 0, peer=16)]) == more_verified([], []) == 1.0
