# SPDX-License-Identifier: Apache-2.0
"""What is remembered of pages that prompts asked for, and what is made of it."""

from __future__ import annotations

import random

import pytest

from banyan.planner.demand import LEAST_ROWS, MOST_AGAIN_LASTS, MOST_ROWS, ROWS_PER_FRAME, Demand

NUM_FRAMES = 400


def prompt(number, num_pages=10):
    return [f"{number}/{page}" for page in range(num_pages)]


def test_age_when_others_are_asked_for_then_it_grows_by_their_pages():
    demand = Demand(NUM_FRAMES)
    demand.asked(prompt(0))
    assert demand.age("0/9") == 0
    demand.asked(prompt(1))
    demand.asked(prompt(2, num_pages=5))
    assert (demand.age("0/0"), demand.age("1/9"), demand.age("2/4")) == (15, 5, 0)


def test_age_when_a_page_is_not_known_then_it_is_older_than_all_others():
    demand = Demand(NUM_FRAMES)
    demand.asked(prompt(0))
    demand.asked(prompt(1))
    assert demand.age("strange") == 20 > demand.age("0/0")
    assert not demand.is_again("strange")


def test_asked_when_a_prompt_begins_like_another_then_that_part_is_asked_for_again():
    demand = Demand(NUM_FRAMES)
    demand.asked(prompt(0, num_pages=6))
    demand.asked([*prompt(0, num_pages=4), *prompt(1)])
    assert [demand.is_again(key) for key in ("0/0", "0/3", "0/4", "1/0")] == [True, True, False, False]


def test_came_when_no_prompt_has_named_a_page_then_its_age_begins_and_others_keep_theirs():
    demand = Demand(NUM_FRAMES)
    demand.asked(prompt(0))
    demand.asked(prompt(1))
    demand.came([*prompt(0), "answer"])
    assert (demand.age("0/9"), demand.age("answer")) == (10, 0)
    assert not demand.is_again("answer")


def test_again_lasts_when_nothing_was_counted_then_age_alone_decides():
    assert Demand(NUM_FRAMES).again_lasts == 1.0


def test_again_lasts_when_a_scan_runs_beside_a_hot_set_then_what_came_before_lasts_longest():
    demand, rng = Demand(NUM_FRAMES), random.Random(1)
    for turn in range(800):
        demand.asked(prompt(rng.randrange(20)) if turn % 4 == 0 else prompt(1_000 + turn))
    assert demand.again_lasts == MOST_AGAIN_LASTS
    demand.asked(prompt("last of the scan"))
    demand.asked(prompt(0))
    demand.asked(prompt(1))
    assert demand.age("0/0") == pytest.approx(10 / MOST_AGAIN_LASTS)


def test_again_lasts_when_conversations_go_on_and_end_then_hardly_longer():
    demand, rng = Demand(NUM_FRAMES), random.Random(1)
    turns, number = {}, 0
    for _ in range(800):
        if len(turns) < 8:
            number += 1
            turns[number] = 1
        conversation = rng.choice(sorted(turns))
        demand.asked(prompt(conversation, num_pages=10 + 5 * turns[conversation]))
        turns[conversation] += 1
        if turns[conversation] > 6:
            del turns[conversation]
    assert demand.again_lasts < 1.5


def test_again_lasts_when_a_hot_set_goes_out_of_use_then_that_is_learnt():
    demand = Demand(NUM_FRAMES)
    for turn in range(400):
        demand.asked(prompt(turn % 7) if turn % 2 else prompt(1_000 + turn))
    assert demand.again_lasts == MOST_AGAIN_LASTS
    for turn in range(4_000):
        demand.asked(prompt(100_000 + turn // 2))
    assert demand.again_lasts == 1.0


@pytest.mark.parametrize("num_frames", [1, NUM_FRAMES, 10_000_000])
def test_memory_when_the_pool_has_any_size_then_bounded(num_frames):
    num_rows = len(Demand(num_frames)._rows)
    assert LEAST_ROWS <= num_rows <= MOST_ROWS
    assert num_rows >= min(ROWS_PER_FRAME * num_frames, MOST_ROWS)


def test_asked_when_more_comes_than_is_remembered_then_the_latest_is_known():
    demand = Demand(16)
    for number in range(2_000):
        demand.asked(prompt(number))
    assert demand.age("1999/0") == 0
    known = sum(demand.age(f"{number}/0") < 20_000 for number in range(2_000))
    assert known < 1_000
