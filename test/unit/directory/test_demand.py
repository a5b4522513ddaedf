# SPDX-License-Identifier: Apache-2.0
"""What is remembered of pages that prompts asked for, and what is made of it."""

from __future__ import annotations

import math
import random
from array import array
from statistics import median

import pytest

from banyan._native import Demand

NUM_FRAMES = 400
MOST_ACCESSES = 8


def page(number, place):
    """Tuples of numbers hash alike in every run."""
    return hash((number, place))


STRANGE = page(-1, 0)


def pages_of(numbers):
    return array("q", numbers).tobytes()


def prompt(number, num_pages=10):
    return pages_of(page(number, place) for place in range(num_pages))


def ask(demand, *prompts):
    """All of them, one served before the next one comes."""
    for keys in prompts:
        demand.asked(keys, "a prompt")
        demand.served("a prompt")


def age(demand, number):
    return demand.age_and_accesses(number)[0]


def num_accesses(demand, number):
    return demand.age_and_accesses(number)[1]


def chance(demand, number):
    (found,) = demand.reuse_probabilities(pages_of([number]))
    return found


@pytest.fixture
def demand():
    return Demand(NUM_FRAMES)


def test_age_when_others_are_asked_for_then_it_grows_by_their_pages(demand):
    ask(demand, prompt(0))
    assert age(demand, page(0, 9)) == 0
    ask(demand, prompt(1), prompt(2, num_pages=5))
    assert (age(demand, page(0, 0)), age(demand, page(1, 9)), age(demand, page(2, 4))) == (15, 5, 0)


def test_age_when_a_page_is_not_known_then_it_is_older_than_all_others(demand):
    ask(demand, prompt(0), prompt(1))
    assert age(demand, STRANGE) == 20 > age(demand, page(0, 0))
    assert num_accesses(demand, STRANGE) == 1


def test_asked_when_a_prompt_begins_like_another_then_that_part_is_asked_for_again(demand):
    ask(demand, prompt(0, num_pages=6), prompt(0, num_pages=4) + prompt(1))
    assert [num_accesses(demand, page(*which)) for which in ((0, 0), (0, 3), (0, 4), (1, 0))] == [2, 2, 1, 1]


def test_asked_when_it_is_again_and_again_then_accesses_are_counted_as_far_as_they_fit(demand):
    for num_times in range(1, 3 * MOST_ACCESSES):
        ask(demand, prompt(0))
        assert num_accesses(demand, page(0, 5)) == min(num_times, MOST_ACCESSES)


def test_came_when_no_prompt_has_named_a_page_then_its_age_begins_and_others_keep_theirs(demand):
    ask(demand, prompt(0), prompt(1))
    demand.came(prompt(0) + pages_of([STRANGE]))
    assert (age(demand, page(0, 9)), age(demand, STRANGE)) == (10, 0)
    assert num_accesses(demand, STRANGE) == 1


def test_chance_when_a_prompt_waits_then_its_pages_are_wanted_for_certain(demand):
    ask(demand, prompt(0), prompt(1))
    demand.asked(prompt(0, num_pages=4), "waiting")
    assert chance(demand, page(0, 3)) == math.inf > chance(demand, page(0, 4))
    demand.served("waiting")
    demand.served("waiting")
    assert chance(demand, page(0, 3)) < math.inf


def test_chance_when_two_prompts_wait_then_each_for_itself(demand):
    demand.asked(prompt(0), "one")
    demand.asked(prompt(1), "two")
    demand.served("one")
    assert chance(demand, page(0, 0)) < chance(demand, page(1, 0)) == math.inf


def test_chance_when_a_prompt_comes_again_under_its_name_then_it_waits_for_what_it_asks_now(demand):
    demand.asked(prompt(0), "one")
    demand.asked(prompt(1), "one")
    assert chance(demand, page(0, 0)) < chance(demand, page(1, 0)) == math.inf


def test_chance_when_nothing_was_learnt_then_the_younger_is_likelier(demand):
    ask(demand, *map(prompt, range(8)))
    chances = [chance(demand, page(number, 5)) for number in range(8)]
    assert chances == sorted(chances) and chances[0] < chances[-1]


def test_chance_when_a_scan_runs_beside_a_hot_set_then_what_came_before_is_likelier(demand):
    rng = random.Random(1)
    for turn in range(800):
        ask(demand, prompt(rng.randrange(20)) if turn % 4 == 0 else prompt(1_000 + turn))
    ask(demand, *(prompt(2_000 + turn) for turn in range(10)))
    # Of the hot set too a few rows have gone to others.
    assert median(chance(demand, page(number, 5)) for number in range(20)) > 10 * chance(demand, page(2009, 5))


def test_heard_when_a_peer_is_asked_then_pages_age_and_are_known_but_nobody_waits_for_them(demand):
    ask(demand, prompt(0))
    demand.peer_access(prompt(1))
    demand.peer_access(prompt(1))
    assert (age(demand, page(0, 5)), age(demand, page(1, 5)), num_accesses(demand, page(1, 5))) == (20, 0, 2)
    assert chance(demand, page(1, 5)) < math.inf


def test_chance_when_a_prompt_waits_and_others_ask_for_its_pages_then_they_are_wanted_until_it_is_served(demand):
    demand.asked(prompt(0), "one")
    demand.asked(prompt(0), "two")
    demand.peer_access(prompt(0))
    demand.served("two")
    assert chance(demand, page(0, 5)) == math.inf
    demand.served("one")
    assert chance(demand, page(0, 5)) < math.inf


def test_heard_when_what_comes_back_came_to_a_peer_then_that_is_learnt(demand):
    for _ in range(12):
        for number in range(100):
            (demand.peer_access if number % 4 else lambda pages: ask(demand, pages))(prompt(number))
    assert demand.powers[0] > 0.0


def grow(demand, num_turns):
    """Conversations that grow and end with their sixth turn, eight at a time."""
    rng, turns, number = random.Random(1), {}, 0
    for _ in range(num_turns):
        if len(turns) < 8:
            number += 1
            turns[number] = 1
        conversation = rng.choice(sorted(turns))
        ask(demand, prompt(conversation, num_pages=10 + 5 * turns[conversation]))
        turns[conversation] += 1
        if turns[conversation] > 6:
            del turns[conversation]


def test_chance_when_conversations_go_on_and_end_then_the_young_are_likelier_and_those_near_their_end_are_not(demand):
    grow(demand, 800)
    assert demand.powers[0] < -0.8
    assert demand.powers[1] < 0.0


def test_chance_when_prompts_come_round_in_turns_then_the_older_is_likelier(demand):
    for _ in range(12):
        ask(demand, *map(prompt, range(100)))
    assert demand.powers[0] > 0.0
    assert chance(demand, page(1, 5)) > chance(demand, page(98, 5))


def test_chance_when_many_prompts_are_asked_each_at_its_own_rate_then_accesses_say_more_than_age(demand):
    rng = random.Random(1)
    for _ in range(1_500):
        ask(demand, prompt(int(120 * rng.random() ** 3)))
    assert demand.powers[1] > 0.5
    assert abs(demand.powers[0]) < demand.powers[1]


def test_chance_when_the_work_changes_then_that_is_learnt(demand):
    for _ in range(12):
        ask(demand, *map(prompt, range(100)))
    assert demand.powers[0] > 0.0
    grow(demand, 800)
    assert demand.powers[0] < -0.5


def test_asked_when_seeded_alike_then_the_same_is_learnt():
    one, two = Demand(NUM_FRAMES), Demand(NUM_FRAMES)
    for demand in (one, two):
        grow(demand, 100)
    assert one.powers == two.powers


def test_asked_when_more_comes_than_is_remembered_then_the_latest_is_known():
    demand = Demand(16)
    for number in range(2_000):
        ask(demand, prompt(number))
    assert age(demand, page(1999, 0)) == 0
    known = sum(age(demand, page(number, 0)) < 20_000 for number in range(2_000))
    assert known < 1_000
