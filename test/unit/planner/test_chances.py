# SPDX-License-Identifier: Apache-2.0
"""What the two powers become: by whom one was likelier, and within which bounds."""

from __future__ import annotations

import random

import pytest

from banyan.planner.chances import LEAST_AGE_POOLS, MOST_AGE_POOLS, MOST_POWER, Chances, Seen


def learnt(lessons):
    chances = Chances()
    for wanted, other in lessons:
        chances.came(wanted, other)
    return chances


def drawn(weight, num_lessons, seed=1):
    """Of two pages with ages and sights by lot, each came by a chance in proportion to its weight."""
    rng = random.Random(seed)
    for _ in range(num_lessons):
        one, two = (Seen(rng.uniform(LEAST_AGE_POOLS, 4.0), rng.randrange(1, 9)) for _ in range(2))
        comes_first = rng.random() * (weight(one) + weight(two)) < weight(one)
        yield (one, two) if comes_first else (two, one)


def test_of_when_nothing_was_learnt_then_the_younger_and_the_oftener_asked_for_are_likelier():
    chances = Chances()
    assert chances.of(0.1, 1) > chances.of(0.2, 1)
    assert chances.of(0.2, 4) == pytest.approx(chances.of(0.1, 1))


def test_came_when_the_work_has_powers_of_its_own_then_these_are_found():
    chances = learnt(drawn(lambda seen: seen.age_pools**0.8 * seen.num_sights**-1.5, 4_000))
    assert chances.age_power == pytest.approx(0.8, abs=0.4)
    assert chances.sights_power == pytest.approx(-1.5, abs=0.4)


def test_came_when_neither_tells_anything_then_both_powers_are_near_nothing():
    chances = learnt(drawn(lambda seen: 1.0, 4_000))
    assert abs(chances.age_power) < 0.4 and abs(chances.sights_power) < 0.4


def test_came_when_it_was_expected_then_hardly_anything_is_learnt():
    expected, surprising = learnt([(Seen(0.02, 1), Seen(4.0, 1))]), learnt([(Seen(4.0, 1), Seen(0.02, 1))])
    assert -1.01 < expected.age_power < -1.0
    assert surprising.age_power > -0.8


def test_came_when_it_is_always_the_same_then_the_powers_are_bounded():
    chances = learnt([(Seen(MOST_AGE_POOLS, 8), Seen(0.0, 1))] * 100_000)
    assert chances.age_power <= MOST_POWER and chances.sights_power <= MOST_POWER
    assert chances.of(0.0, 1) > 0.0


def test_of_when_a_page_is_younger_or_older_than_what_counts_then_as_that():
    chances = Chances()
    assert chances.of(0.0, 1) == chances.of(LEAST_AGE_POOLS, 1)
    assert chances.of(1e9, 1) == chances.of(MOST_AGE_POOLS, 1)


def test_state_when_asked_then_the_powers():
    assert Chances().state() == {"age_power": -1.0, "sights_power": 0.5}
