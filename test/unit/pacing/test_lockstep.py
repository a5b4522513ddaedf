# SPDX-License-Identifier: Apache-2.0
from banyan.pacing.lockstep import MoveBudget


def test_budget_when_nothing_was_moved_then_one_request_of_any_size_may():
    budget = MoveBudget(most_tokens=100)
    assert budget.has_room(10_000)
    budget.take(10_000)
    assert not budget.has_room(1)


def test_budget_when_requests_fit_together_then_they_join_until_it_is_spent():
    budget = MoveBudget(most_tokens=100)
    for num_tokens in (60, 40):
        assert budget.has_room(num_tokens)
        budget.take(num_tokens)
    assert not budget.has_room(1)


def test_budget_when_it_is_spent_then_requests_that_move_nothing_still_join():
    budget = MoveBudget(most_tokens=10, moved_tokens=10)
    assert budget.has_room(0)
