# SPDX-License-Identifier: Apache-2.0
"""A prompt that came just before its pages were announced is looked up again, for a while."""

from banyan.features.pairs.arrivals import MAX_PROMPTS, PATIENCE_S, Arrivals


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_prompt_when_others_announce_pages_then_it_is_looked_up_again_once():
    arrivals = Arrivals(Clock())
    assert arrivals.to_look_up(1) == []
    arrivals.came("a")
    assert arrivals.to_look_up(1) == []
    assert arrivals.to_look_up(2) == ["a"]
    assert arrivals.to_look_up(2) == []


def test_prompt_when_it_came_long_ago_then_it_is_forgotten():
    clock = Clock()
    arrivals = Arrivals(clock)
    arrivals.came("a")
    clock.now_s = PATIENCE_S / 2
    arrivals.came("b")
    clock.now_s = 1.2 * PATIENCE_S
    assert arrivals.to_look_up(1) == ["b"]


def test_prompts_when_there_are_too_many_then_the_latest_stay():
    arrivals = Arrivals(Clock())
    for number in range(MAX_PROMPTS + 5):
        arrivals.came(number)
    again = arrivals.to_look_up(1)
    assert len(again) == MAX_PROMPTS and again[0] == 5
