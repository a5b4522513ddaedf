# SPDX-License-Identifier: Apache-2.0
"""Which requests wait for a forward that computes what they begin with."""

from array import array

import pytest

from banyan.planner.pending_prompts import LEAST_MOVED_TOKENS, LEAST_SHARED_TOKENS, PendingPrompts, Prompt

L = LEAST_SHARED_TOKENS
M = LEAST_MOVED_TOKENS


def tokens(num_shared, num_own=0, own=7):
    return array("q", [*range(num_shared), *[own] * num_own])


def prompt(num_shared, num_own=0, own=7, namespace=None):
    return Prompt(namespace, tokens(num_shared, num_own, own))


def comes(pending, asked, num_found):
    """Whether it does to a request all but the last token of which may come from a cache."""
    return pending.are_computed(asked, num_found, len(asked.tokens) - 1)


class Forward:
    """Whether its results are there."""

    is_over = False

    def __call__(self):
        return self.is_over


@pytest.fixture
def pending():
    pending = PendingPrompts()
    pending.begin_pass()
    return pending


def test_prompt_when_its_beginning_is_being_computed_then_it_waits_for_that(pending):
    assert not comes(pending, prompt(1000, 50, own=1), 0)
    pending.take(prompt(1000, 50, own=2), 1050, Forward())
    assert comes(pending, prompt(1000, 50, own=1), 0)


@pytest.mark.parametrize(
    ("num_shared", "num_found", "waits"),
    [
        (L, 0, True),
        (L - 1, 0, False),
        # What it finds already is no reason to wait.
        (1000, 1000 - L, True),
        (1000, 1001 - L, False),
        (1000, 1000, False),
    ],
)
def test_prompt_when_too_little_behind_what_is_cached_is_shared_then_it_does_not_wait(
    pending, num_shared, num_found, waits
):
    pending.take(prompt(num_shared, 500, own=2), num_shared + 500, Forward())
    assert comes(pending, prompt(num_shared, 500, own=1), num_found) is waits


def test_prompt_when_it_parts_before_what_is_cached_of_it_then_it_does_not_wait(pending):
    other = tokens(1000)
    other[3] = 99
    pending.take(Prompt(None, other), 1000, Forward())
    assert not comes(pending, prompt(1000), 512)


def test_prompt_when_only_a_piece_of_the_other_is_computed_then_it_waits_as_far_as_that_goes(pending):
    pending.take(prompt(5000), 2048, Forward())
    assert comes(pending, prompt(5000), 2048 - L)
    assert not comes(pending, prompt(5000), 2048)


def test_prompt_when_its_namespace_is_another_then_it_does_not_wait(pending):
    pending.take(prompt(1000, namespace=("adapter", None)), 1000, Forward())
    assert not comes(pending, prompt(1000, namespace=("other", None)), 0)
    assert comes(pending, prompt(1000, namespace=("adapter", None)), 0)


def test_prompt_when_the_forward_is_of_the_pass_before_then_it_waits_until_its_results_are_there(pending):
    forward = Forward()
    pending.take(prompt(1000), 1000, forward)
    pending.begin_pass()
    assert comes(pending, prompt(1000), 0)
    forward.is_over = True
    assert not comes(pending, prompt(1000), 0)


def test_prompt_when_what_it_waits_for_never_comes_then_it_waits_no_longer_than_the_next_pass(pending):
    pending.take(prompt(1000), 1000, Forward())
    pending.begin_pass()
    pending.begin_pass()
    assert not comes(pending, prompt(1000), 0)


def test_prompts_when_all_begin_alike_then_one_is_computed_and_the_others_follow_it(pending):
    waiting, batches, found = [prompt(1000, 50, own) for own in range(1, 9)], [], 0
    while waiting:
        pending.begin_pass()
        batch, forward = [], Forward()
        for each in waiting:
            if not comes(pending, each, found):
                batch.append(each)
                pending.take(each, 1050, forward)
        waiting = [each for each in waiting if each not in batch]
        batches.append(len(batch))
        found, forward.is_over = 1000, True
    assert batches == [1, 7]


def test_prompt_when_too_little_of_it_may_come_from_a_cache_then_it_does_not_wait(pending):
    pending.take(prompt(1000), 1000, Forward())
    assert pending.are_computed(prompt(1000), 0, L)
    assert not pending.are_computed(prompt(1000), 0, L - 1)


@pytest.mark.parametrize(
    ("num_shared", "num_cached", "waits"),
    [(M, 0, True), (M - 1, 0, False), (2 * M, M, True), (2 * M - 1, M, False)],
)
def test_prompt_when_what_it_begins_with_is_being_moved_then_it_is_told_where_that_is_much(
    pending, num_shared, num_cached, waits
):
    pending.take(prompt(num_shared, 50, own=2), num_shared + 50, Forward())
    assert pending.are_brought(prompt(num_shared, 50, own=1), num_cached) is waits
