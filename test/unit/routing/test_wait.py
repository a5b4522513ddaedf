# SPDX-License-Identifier: Apache-2.0
"""When a request waits for a prefix that a rank is computing: in full pools, and where it pays."""

from __future__ import annotations

from msgspec.structs import replace

from banyan.lab.sim.prompts import PagedPrompt
from banyan.routing import Dispatcher, LoadReport, Prompt, Wait
from banyan.routing.lmetric import LMetric
from banyan.routing.view import Query, RankState
from banyan.routing.wait import LEAST_GAIN_TOKENS, short_of_room, wait_for

PAGE = 16
FULL = RankState(rank=0, unused_tokens=0, pending_prefill_tokens=1_000, prefill_tokens_per_s=500.0)
IDLE = RankState(rank=1, unused_tokens=0, prefill_tokens_per_s=500.0)
QUERY = Query(turn=0, num_prompt_tokens=2_000)


def waited(*, query=QUERY, held=0, awaited=1_000, busy=FULL, chosen=IDLE):
    return wait_for(query, held, {0: awaited}, chosen, [busy, chosen])


def test_wait_when_all_pools_are_full_then_until_the_rank_has_the_prefix():
    assert waited() == Wait(0, 1_000, 2.0)


def test_wait_when_the_chosen_rank_has_room_then_not():
    assert waited(chosen=replace(IDLE, unused_tokens=2_000)) is None
    assert waited(chosen=replace(IDLE, unused_tokens=None)) is None


def test_wait_when_the_room_is_spoken_for_then_it_is_none():
    assert waited(chosen=replace(IDLE, unused_tokens=2_000, pending_prefill_tokens=2_000)) is not None
    assert short_of_room(2_000, replace(IDLE, unused_tokens=2_500, pending_prefill_tokens=1_000)) == 500


def test_wait_when_the_rank_has_more_before_it_than_the_prefix_is_worth_then_not():
    """Worth its computation, and once more for what its second copy pushes out."""
    assert waited(busy=replace(FULL, pending_prefill_tokens=2_000)) is not None
    assert waited(busy=replace(FULL, pending_prefill_tokens=2_001)) is None
    busy_too = replace(IDLE, pending_prefill_tokens=500)
    assert waited(busy=replace(FULL, pending_prefill_tokens=2_500), chosen=busy_too) is not None


def test_wait_when_little_or_nothing_is_gained_then_not():
    assert waited(awaited=LEAST_GAIN_TOKENS - 1) is None
    assert waited(held=900) is None
    assert waited(query=replace(QUERY, fetchable_tokens=900)) is None
    assert wait_for(QUERY, 0, {}, IDLE, [FULL, IDLE]) is None


def test_wait_when_the_rank_has_not_measured_itself_then_nobody_knows_how_long_it_would_be():
    assert waited(busy=replace(FULL, prefill_tokens_per_s=None)) is None


def prompt(numbers, *, held=(0, 0)):
    return Prompt(
        len(numbers) * PAGE, cached_tokens=held, fetchable_tokens=max(held), tokens=PagedPrompt(numbers, PAGE)
    )


def dispatcher(unused_tokens):
    made = Dispatcher(2, LMetric())
    for rank in range(2):
        report = LoadReport(
            taken_s=1.0, unused_tokens=unused_tokens, total_prefill_tokens=500, total_prefill_us=1_000_000
        )
        made.reported(rank, report)
    return made


def test_dispatcher_when_a_rank_computes_the_beginning_then_the_next_waits_for_it_until_it_is_done():
    books = dispatcher(0)
    first = list(range(100))
    books.count(prompt(first), 0, 2.0)
    second = prompt([*first[:60], *range(500, 540)])
    wait = books.wait(second, (0, 1))
    assert wait == Wait(0, 60 * PAGE, 1_600 / 500)
    assert books.is_awaited(second, wait)
    books.reported(0, LoadReport(taken_s=3.0, unused_tokens=0, total_prefill_tokens=2_101, total_prefill_us=2_000_000))
    assert not books.is_awaited(second, wait)
    assert books.wait(prompt([*first[:60], *range(500, 540)], held=(60 * PAGE, 0)), (0, 1)) is None


def test_dispatcher_when_there_is_room_or_nothing_in_common_or_the_rank_is_gone_then_nobody_waits():
    first = list(range(100))
    for unused_tokens in (None, 1 << 20):
        books = dispatcher(unused_tokens)
        books.count(prompt(first), 0, 2.0)
        assert books.wait(prompt(first[:60]), (0, 1)) is None
    books = dispatcher(0)
    books.count(prompt(first), 0, 2.0)
    assert books.wait(prompt(list(range(300, 400))), (0, 1)) is None
    assert books.wait(prompt(first), (1,)) is None
