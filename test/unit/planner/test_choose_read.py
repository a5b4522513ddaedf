# SPDX-License-Identifier: Apache-2.0
"""From which of several nodes that have some of a prompt it is read."""

import pytest
from test.unit.planner.test_planner import PAGE, planner

from banyan.core import Run, SourceKind
from banyan.planner import Action, MoveRates, Tail
from banyan.planner.plan import Estimated, Plan, PlanReason, most_saving

COMPUTED = Estimated(0, 0.0, 0.0, 1000.0, 1000.0, 0.0)
NUM_PAGES = 100
LEFT, UNKNOWN = Plan(0, PlanReason.FASTER, None, COMPUTED), Plan(5, PlanReason.UNMEASURED, None, COMPUTED)


def moving(total_us, error_us=0.0):
    return Plan(9, PlanReason.FASTER, Estimated(9, 0.0, 0.0, 0.0, total_us, error_us), COMPUTED)


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        ([moving(500)], 0),
        ([moving(500), moving(400), moving(450)], 1),
        ([moving(500, error_us=150), moving(400), moving(300)], 2),
        ([moving(500), moving(500)], 0),
        ([LEFT, moving(900)], 1),
        ([LEFT, LEFT], 0),
        ([LEFT, UNKNOWN, moving(1)], 1),
        ([UNKNOWN, moving(1)], 0),
        ([moving(900), UNKNOWN], 0),
    ],
)
def test_plans_when_compared_then_the_first_unless_another_saves_more_by_more_than_the_error(plans, chosen):
    assert most_saving(plans) == chosen


def tails(**pages):
    """A tail of which nodes have so many pages each."""
    prompt = NUM_PAGES * PAGE + 8
    return [Tail(0, prompt, PAGE, (Run(SourceKind.REMOTE, num_pages, node),)) for node, num_pages in pages.items()]


def rates_of(**per_token_us):
    rates = MoveRates()
    for node, value in per_token_us.items():
        for num_tokens in (16, 256, 1024):
            for _ in range(5):
                rates.observe(node, num_tokens, value * num_tokens)
    return rates


@pytest.mark.parametrize(
    ("pages", "chosen"),
    [
        ({"slow": 100, "quick": 60}, 1),
        ({"slow": 100, "slower": 90, "quick": 60}, 2),
        ({"quick": 100, "slow": 100}, 0),
        ({"middling": 100, "quick": 95}, 1),
        ({"middling": 100, "quick": 3}, 0),
        ({"slow": 100, "new": 60}, 1),
        ({"new": 100, "quick": 99}, 0),
        ({"slow": 100, "slower": 60}, 0),
    ],
)
def test_read_when_several_nodes_have_some_of_it_then_from_the_one_that_saves_most_time(pages, chosen):
    ours = planner(rates_of(slow=5000.0, slower=9000.0, middling=50.0, quick=1.0), min_pages=2)
    found = tails(**pages)
    assert ours.choose_read("r", found) == chosen
    plan = ours.decide_read("r", found[chosen])
    assert (plan.num_pages > 0) == (list(pages)[chosen] in ("quick", "new", "middling"))


def test_read_when_nothing_is_known_or_all_is_asked_for_then_from_the_one_with_the_most():
    found = tails(slow=100, quick=60)
    assert planner(MoveRates()).choose_read("r", found) == 0
    for action in Action:
        assert planner(rates_of(slow=5000.0, quick=1.0)).choose_read("r", found, action) == 0


def test_read_when_the_node_with_the_most_was_slow_once_then_a_trial_finds_out_and_others_are_used_until_then():
    rates = rates_of(slow=120.0, quick=1.0)
    # Alone a part of it would be moved, and tell how fast it is.
    ours, chosen = planner(rates), []
    for number in range(200):
        found = tails(slow=100, quick=60)
        chosen.append(ours.choose_read(f"r{number}", found))
        plan = ours.decide_read(f"r{number}", found[chosen[-1]])
        assert plan.num_pages == (60 if chosen[-1] else 100)
        if chosen[-1] == 0:
            rates.observe("slow", 100 * PAGE, 100 * PAGE * 1.0)
    assert chosen[:50] == [1] * 50 and chosen[-50:] == [0] * 50 and chosen == sorted(chosen, reverse=True)
