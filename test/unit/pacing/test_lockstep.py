# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.pacing.lockstep import MOST_MOVED_BYTES, MoveBudget, most_moved_tokens


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


@pytest.mark.parametrize(
    ("decode_us", "token_us", "num_tokens"),
    [
        (40_000.0, 20.0, 2_000),
        (10.0, 20.0, 0),
        (None, 20.0, MOST_MOVED_BYTES // 1024),
        (40_000.0, None, MOST_MOVED_BYTES // 1024),
    ],
    ids=["both known", "no token in time", "no forward yet", "no move yet"],
)
def test_window_when_a_decode_step_was_measured_then_what_comes_in_its_time(decode_us, token_us, num_tokens):
    assert most_moved_tokens(1024, decode_us, token_us) == num_tokens
