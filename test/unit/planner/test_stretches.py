# SPDX-License-Identifier: Apache-2.0
"""Where runs of pages are split: in few stretches, none of them shorter than it need be."""

from __future__ import annotations

from itertools import pairwise

import pytest

from banyan.planner.stretches import MOST_STRETCHES, STRETCHES_PER_POOL, least_stretch, splits


def test_splits_when_a_run_is_long_then_it_has_the_most_stretches():
    assert list(splits(100, 200, 8)) == [120, 140, 160, 180]


def test_splits_when_a_run_is_short_then_stretches_of_the_least_length_or_none():
    assert list(splits(0, 20, 8)) == [8]
    assert list(splits(0, 8, 8)) == list(splits(0, 11, 8)) == list(splits(5, 5, 8)) == []


@pytest.mark.parametrize("least", [1, 7, 64])
def test_splits_when_of_any_length_then_few_and_inside_and_the_last_stretch_has_half_of_the_least(least):
    for end in range(10, 500):
        at = [10, *splits(10, end, least), end]
        lengths = [after - before for before, after in pairwise(at)]
        assert len(lengths) <= MOST_STRETCHES and at == sorted(at)
        assert all(length >= least for length in lengths[:-1]) and (len(lengths) == 1 or lengths[-1] >= least // 2)


def test_least_stretch_when_a_pool_is_large_then_a_64th_of_it():
    assert (least_stretch(64_000), least_stretch(3)) == (64_000 // STRETCHES_PER_POOL, 1)
