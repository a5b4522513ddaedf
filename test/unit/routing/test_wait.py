# SPDX-License-Identifier: Apache-2.0
"""When a request waits for a prefix that a rank is computing: where that is sooner, and in full pools for longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from banyan.routing import Dispatcher, LoadReport, Prompt, Wait
from banyan.routing.policies import LMetric
from banyan.routing.view import Query, RankState
from banyan.routing.wait import LEAST_GAIN_TOKENS, Coming, short_of_room, wait_for
from banyan_lab.sim.prompts import PagedPrompt

PAGE = 16
BUSY = RankState(rank=0, unused_tokens=0, pending_prefill_tokens=1_000, prefill_tokens_per_s=500.0)
FULL = RankState(rank=1, unused_tokens=0, prefill_tokens_per_s=500.0)
ROOMY = replace(FULL, unused_tokens=2_000)
UNBOUNDED = replace(FULL, unused_tokens=None)
QUERY = Query(turn=0, num_prompt_tokens=2_000)


def waited(*, query=QUERY, held=0, pending=1_000, until=1_000, busy=BUSY, chosen=FULL):
    return wait_for(query, held, {0: Coming(pending, until)}, chosen, [busy, chosen])


def test_wait_when_all_pools_are_full_then_until_the_rank_has_the_prefix():
    assert waited() == Wait(0, 1_000, 2.0)


def test_wait_when_there_is_room_then_only_where_that_is_sooner_than_computing():
    sooner = 1_000 - LEAST_GAIN_TOKENS
    for chosen in (ROOMY, UNBOUNDED):
        assert waited(chosen=chosen, until=sooner) == Wait(0, 1_000, sooner / 500)
        assert waited(chosen=chosen, until=sooner + 1) is None


def test_wait_when_the_chosen_rank_has_other_work_first_then_that_counts():
    behind = replace(ROOMY, pending_prefill_tokens=600, unused_tokens=2_600)
    assert waited(chosen=behind, until=1_600 - LEAST_GAIN_TOKENS) is not None
    assert waited(chosen=behind, until=1_601 - LEAST_GAIN_TOKENS) is None


def test_wait_when_there_is_room_on_the_rank_itself_then_it_queues_there():
    assert waited(chosen=replace(BUSY, unused_tokens=None), until=10) is None
    assert waited(chosen=BUSY, until=10) is not None


def test_wait_when_the_room_is_spoken_for_then_it_is_none():
    assert waited(chosen=replace(ROOMY, pending_prefill_tokens=2_000), until=3_500) is not None
    assert short_of_room(2_000, replace(FULL, unused_tokens=2_500, pending_prefill_tokens=1_000)) == 500


def test_wait_when_the_rank_has_more_before_it_than_the_prefix_is_worth_then_not():
    """Worth its computation, and once more for what its second copy pushes out."""
    assert waited(until=2_000) is not None
    assert waited(until=2_001) is None
    assert waited(until=2_500, chosen=replace(FULL, pending_prefill_tokens=500)) is not None


def test_wait_when_several_ranks_compute_it_then_for_the_most_and_the_soonest():
    other = replace(BUSY, rank=2)
    for coming, rank in (
        ({0: Coming(1_000, 500), 2: Coming(1_000, 200)}, 2),
        ({0: Coming(1_200, 500), 2: Coming(1_000, 200)}, 0),
    ):
        wait = wait_for(QUERY, 0, coming, FULL, [BUSY, FULL, other])
        assert wait is not None and wait.rank == rank


def test_wait_when_little_or_nothing_is_gained_then_not():
    assert waited(pending=LEAST_GAIN_TOKENS - 1, until=0) is None
    assert waited(held=900, until=0) is None
    assert waited(query=replace(QUERY, fetchable_tokens=900), until=0) is None
    assert wait_for(QUERY, 0, {}, FULL, [BUSY, FULL]) is None


def test_wait_when_the_rank_has_not_measured_itself_then_nobody_knows_how_long_it_would_be():
    assert waited(busy=replace(BUSY, prefill_tokens_per_s=None)) is None


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
    wait = books.wait(second, (0, 1), 2.0)
    assert wait == Wait(0, 60 * PAGE, 1_600 / 500)
    assert books.is_pending(second, wait)
    books.reported(0, LoadReport(taken_s=3.0, unused_tokens=0, total_prefill_tokens=2_101, total_prefill_us=2_000_000))
    assert not books.is_pending(second, wait)
    assert books.wait(prompt([*first[:60], *range(500, 540)], held=(60 * PAGE, 0)), (0, 1), 3.0) is None


def test_dispatcher_when_half_of_it_should_be_computed_then_the_next_waits_though_there_is_room():
    """The rank has computed 500 tokens a second so far; a prompt of 1,600 takes it 3.2 s."""
    for unused_tokens in (None, 1 << 20):
        books = dispatcher(unused_tokens)
        first = list(range(100))
        books.count(prompt(first), 0, 2.0)
        assert books.wait(prompt(first), (0, 1), 2.0) is None, "that would be no sooner"
        assert books.wait(prompt(first), (0, 1), 3.6) == Wait(0, 1_600, 800 / 500)
        assert books.wait(prompt(first), (0, 1), 60.0) == Wait(0, 1_600, 0.0)


def test_dispatcher_when_others_come_before_it_then_they_count_and_those_behind_it_do_not():
    books = dispatcher(None)
    books.count(prompt(range(1_000, 1_100)), 0, 2.0)
    books.count(prompt(range(100)), 0, 2.0)
    books.count(prompt(range(2_000, 2_100)), 0, 2.0)
    assert books.wait(prompt(range(100)), (0, 1), 3.6) is None
    assert books.wait(prompt(range(100)), (0, 1), 6.0) == Wait(0, 1_600, 1_200 / 500)


def test_dispatcher_when_nothing_is_in_common_or_the_rank_is_gone_then_nobody_waits():
    first = list(range(100))
    books = dispatcher(0)
    assert books.wait(prompt(first), (0, 1), 2.0) is None
    books.count(prompt(first), 0, 2.0)
    assert books.wait(prompt(range(300, 400)), (0, 1), 2.0) is None
    assert books.wait(prompt(first), (1,), 2.0) is None


@given(
    num_tokens=st.integers(1, 1 << 20),
    held=st.integers(0, 1 << 20),
    pending=st.integers(0, 1 << 20),
    until=st.integers(0, 1 << 22),
    behind=st.integers(0, 1 << 20),
    unused=st.none() | st.integers(0, 1 << 20),
)
def test_wait_when_states_are_any_then_it_is_no_longer_than_twice_its_own_and_what_is_before_it(
    num_tokens, held, pending, until, behind, unused
):
    # Whoever comes meanwhile passes it: a prompt that waited for longer would starve.
    chosen = replace(FULL, unused_tokens=unused, pending_prefill_tokens=behind)
    query = Query(turn=0, num_prompt_tokens=num_tokens)
    wait = waited(query=query, held=min(held, num_tokens), pending=min(pending, num_tokens), until=until, chosen=chosen)
    assert wait is None or wait.expected_s * BUSY.prefill_tokens_per_s <= 2 * num_tokens + behind
