# SPDX-License-Identifier: Apache-2.0
"""A prompt of which nothing is cached is not passed over for ever, and short waits of others stay short."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from banyan.pacing.bounded_order import LEAST_TOKENS, MOST_GUARDED, Queue


@dataclass(eq=False)
class Req:
    num_tokens: int
    came_at: int = 0
    passed_by: list = field(default_factory=list)


def queue():
    return Queue(lambda req: req.num_tokens)


def shortest_first(waiting):
    return sorted(waiting, key=lambda req: req.num_tokens)


def test_order_when_nobody_has_been_passed_over_then_it_is_the_one_that_was_wanted():
    reqs = [Req(4000), Req(10), Req(20)]
    mine = queue()
    mine.come(reqs)
    assert mine.order(shortest_first(reqs)) == [reqs[1], reqs[2], reqs[0]]


def test_order_when_it_is_that_in_which_they_came_then_nobody_is_looked_for_that_was_passed(monkeypatch):
    """Each of thousands would be held against each of those that have waited longest, on every pass."""
    monkeypatch.setattr("banyan.pacing.bounded_order._Ordering", None)
    reqs = [Req(4000), Req(10), Req(20)]
    mine = queue()
    for waiting in (reqs, [*reqs[1:], Req(5)]):
        mine.come(waiting)
        assert mine.order(waiting) == waiting
    assert [one.num_tokens for one in mine._waiting.values()] == [10, 20, 5]


def test_cold_prompt_when_as_much_as_its_own_has_passed_it_then_it_goes_first():
    cold, mine, num_passed = Req(4000), queue(), 0
    waiting = [cold]
    while waiting[0] is cold or num_passed < 100:
        waiting = [cold, Req(100)]
        mine.come(waiting)
        waiting = mine.order(shortest_first(waiting))
        if waiting[0] is cold:
            break
        num_passed += 1
    assert num_passed == 40


def test_order_when_one_round_alone_would_pass_too_much_then_the_cold_one_is_in_its_middle():
    cold, warm = Req(1000), [Req(100) for _ in range(30)]
    mine = queue()
    mine.come([cold, *warm])
    placed = mine.order([*warm, cold])
    assert placed.index(cold) == 10 and placed[:10] + placed[11:] == warm


def test_request_when_it_waits_no_longer_then_nothing_of_it_is_remembered():
    mine = queue()
    for _ in range(100):
        reqs = [Req(10) for _ in range(5)]
        mine.come(reqs)
        mine.order(reqs)
    assert len(mine._waiting) == 5
    mine.come([])
    assert not mine._waiting


def test_request_when_it_has_gone_and_the_queue_is_empty_then_it_is_held_by_nobody():
    mine, reqs = queue(), [Req(10), Req(20)]
    mine.come(reqs)
    mine.order(reqs)
    held = [weakref.ref(req) for req in reqs]
    del reqs
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_request_when_it_has_the_id_of_one_that_has_gone_then_it_is_another_one():
    mine, first = queue(), Req(4000)
    mine.come([first, Req(1)])
    mine.order([first])
    (key,) = [key for key, one in mine._waiting.items() if one.request() is first]
    other = Req(10)
    mine._waiting[id(other)] = mine._waiting.pop(key)
    mine.come([other])
    assert [one.request() for one in mine._waiting.values()] == [other] and mine._waiting[id(other)].number == 2


@given(st.lists(st.lists(st.integers(0, 3000), max_size=6), max_size=40), st.integers(0, 5), st.integers(0, 1 << 30))
def test_request_when_queues_are_any_then_no_more_than_its_own_passes_it_and_none_is_lost(rounds, most_taken, seed):
    draw, mine, waiting, came = random.Random(seed), queue(), [], 0
    for sizes in rounds:
        for num_tokens in sizes:
            came += 1
            waiting.append(Req(num_tokens, came))
        mine.come(waiting)
        wanted = draw.sample(waiting, len(waiting))
        placed = mine.order(wanted)
        assert sorted(map(id, placed)) == sorted(map(id, waiting))
        taken, waiting = placed[:most_taken], placed[most_taken:]
        guarded = sorted([*taken, *waiting], key=lambda req: req.came_at)[:MOST_GUARDED]
        for number, one in enumerate(taken):
            for other in [*taken[number + 1 :], *waiting]:
                if other.came_at < one.came_at and other in guarded:
                    other.passed_by.append(max(1, one.num_tokens))
    for req in waiting:
        assert sum(req.passed_by) <= max(req.num_tokens, LEAST_TOKENS)


def times_to_first_token(order, *, num_requests=4000, share_cold=0.05, load=0.9):
    """A rank that computes one prompt after the other, a token a tick. Waits of cold ones and of warm ones."""
    draw = random.Random(1)
    mean = 64 * (1 - share_cold) + 4000 * share_cold
    at, arrivals = 0.0, []
    for _ in range(num_requests):
        at += draw.expovariate(load / mean)
        arrivals.append(Req(4000 if draw.random() < share_cold else 64, int(at)))
    now, waiting, waits, mine = 0, [], {4000: [], 64: []}, queue()
    while arrivals or waiting:
        while arrivals and (arrivals[0].came_at <= now or not waiting):
            waiting.append(arrivals.pop(0))
            now = max(now, waiting[-1].came_at)
        waiting = order(mine, waiting)
        req = waiting.pop(0)
        now += req.num_tokens
        waits[req.num_tokens].append(now - req.came_at)
    return {size: sorted(each) for size, each in waits.items()}


def bounded(mine, waiting):
    mine.come(waiting)
    return mine.order(shortest_first(waiting))


def test_times_when_one_prompt_in_twenty_is_cold_then_its_p99_is_at_most_twice_that_of_a_row_and_warm_ones_gain():
    row, kept = times_to_first_token(lambda _, waiting: waiting), times_to_first_token(bounded)
    assert kept[4000][len(kept[4000]) * 99 // 100] <= 2 * row[4000][len(row[4000]) * 99 // 100]
    assert kept[64][len(kept[64]) // 2] < row[64][len(row[64]) // 2]
