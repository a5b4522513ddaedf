# SPDX-License-Identifier: Apache-2.0
import hashlib

import pytest

from banyan.telemetry import Holding, RecentPrompts
from banyan.telemetry.recent_prompts import MAX_MARKS, marked

PAGE = 16


def chain(*numbers):
    return [hashlib.sha256(str(numbers[: place + 1]).encode()).hexdigest() for place in range(len(numbers))]


def told(prompts, pools=(0, 0), arena=0):
    return prompts.state(lambda keys: Holding(pools, arena))


def test_prompts_when_a_turn_continues_another_then_it_takes_its_place():
    prompts = RecentPrompts(PAGE)
    prompts.saw("a1", chain(1, 2), 1.0)
    prompts.saw("b1", chain(7), 2.0)
    prompts.saw("a2", chain(1, 2, 3), 3.0)
    assert [(one["rid"], one["num_turns"], one["num_tokens"]) for one in told(prompts)] == [
        ("b1", 1, 16),
        ("a2", 2, 48),
    ]


def test_prompts_when_too_many_came_then_the_oldest_are_forgotten_and_empty_ones_are_none():
    prompts = RecentPrompts(PAGE, max_prompts=2)
    for number in range(3):
        prompts.saw(str(number), chain(number), 0.0)
    prompts.saw("empty", [], 0.0)
    assert [one["rid"] for one in told(prompts)] == ["1", "2"]


@pytest.mark.parametrize("num_pages", [1, 63, 64, 65, 1000, 8192, 8191])
def test_marks_when_a_prompt_is_long_then_few_on_multiples_of_a_power_of_two_and_the_last(num_pages):
    places, picked = marked([str(place) for place in range(1, num_pages + 1)])
    assert picked == [str(place) for place in places]
    assert len(places) <= MAX_MARKS and places[-1] == num_pages and list(places) == sorted(set(places))
    step = places[0]
    assert step & (step - 1) == 0 and all(place % step == 0 for place in places[:-1])


def test_holding_when_marks_are_held_then_it_is_told_in_tokens():
    prompts = RecentPrompts(PAGE)
    prompts.saw("r", chain(*range(100)), 0.0)
    (one,) = told(prompts, pools=(2, 0), arena=len(marked(chain(*range(100)))[0]))
    assert one["pools"] == [4 * PAGE, 0] and one["arena"] == 100 * PAGE == one["num_tokens"]
    assert one["marks"][0] == [2 * PAGE, chain(*range(100))[1]]
