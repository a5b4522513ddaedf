# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.planner import ForwardSample, PrefillCost

TRUE = PrefillCost(fixed_us=9000.0, token_us=400.0, pair_us=0.2, context_us=1.5, masked_us=0.1)
GRID = list(itertools.product((16, 64, 256, 1024), (0, 512, 2048, 6144)))


def measured(pieces, *, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [ForwardSample((piece,), TRUE.time_us((piece,)) * rng.uniform(1 - noise, 1 + noise)) for piece in pieces]


def test_fit_when_forwards_follow_the_terms_then_their_weights_are_found():
    cost = PrefillCost.fit(measured(GRID))
    for name in ("fixed_us", "token_us", "pair_us", "context_us", "masked_us"):
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)


def test_fit_when_times_are_noisy_then_other_lengths_are_predicted_within_the_noise():
    cost = PrefillCost.fit(measured(GRID, noise=0.1))
    others = measured([(100, 300), (700, 5000), (32, 4000), (900, 0)])
    errors = [abs(cost.time_us(one.pieces) - one.forward_us) / one.forward_us for one in others]
    assert sum(errors) / len(errors) < 0.1


def test_fit_when_forwards_of_one_shape_are_all_there_is_then_that_shape_is_predicted():
    cost = PrefillCost.fit([ForwardSample(((100, 50),), 5000.0)] * 3)
    assert cost.time_us([(100, 50)]) == pytest.approx(5000.0)


def test_fit_when_a_term_would_be_negative_then_it_is_left_out():
    falling = [ForwardSample(((100, prefix),), 5000.0 - prefix) for prefix in (0, 1000, 2000)]
    cost = PrefillCost.fit(falling)
    assert cost.context_us == cost.pair_us == 0.0
    assert cost.time_us([(100, 1000)]) == pytest.approx(4000.0, rel=0.2)


@pytest.mark.parametrize("samples", [[], [ForwardSample(((1, 0),), 0.0)]])
def test_fit_when_there_is_nothing_to_fit_then_refused(samples):
    with pytest.raises(ValueError, match="took time"):
        PrefillCost.fit(samples)


pieces = st.lists(st.tuples(st.integers(0, 8192), st.integers(0, 100_000)), max_size=6)


@given(pieces, pieces)
def test_time_when_batches_are_joined_then_the_fixed_part_counts_once(one, other):
    joined = TRUE.time_us(one + other)
    assert joined <= TRUE.time_us(one) + TRUE.time_us(other) + 1e-6
    assert joined >= max(TRUE.time_us(one), TRUE.time_us(other)) - 1e-6


@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0, 0.0), (-1.0, 1.0, 0.0, 0.0)])
def test_cost_when_weights_are_none_then_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        PrefillCost(*weights)
