# SPDX-License-Identifier: Apache-2.0
"""The costs that a server tells of its hooks, and what came between two looks at them."""

from __future__ import annotations

from banyan_lab.bench.hooks import REQUEST, STEP, Costs, Spent, rows


def info(*ranks):
    return {"internal_states": [{"banyan": rank} for rank in ranks]}


def rank(control_us, **hooks):
    told = {name: {"num_calls": calls, "own_us": own_us} for name, (calls, own_us) in hooks.items()}
    return {"control_us": control_us, "dispatch_us": 10, "hooks": told}


def test_costs_when_a_server_has_two_ranks_then_they_are_added():
    costs = Costs.of(info(rank(5, lookup=(1, 5)), rank(8, lookup=(2, 6), load=(1, 2))))
    assert costs == Costs(13, 20, {"lookup": Spent(3, 11), "load": Spent(1, 2)})


def test_costs_when_a_server_shares_nothing_then_there_are_none():
    assert Costs.of({"internal_states": [{}]}) == Costs()
    assert Costs.of({}).since(Costs()) == Costs()


def test_costs_when_two_looks_are_compared_then_hooks_that_were_not_called_are_left_out():
    before = Costs.of(info(rank(5, lookup=(1, 5), load=(4, 4))))
    after = Costs.of(info(rank(9, lookup=(3, 9), load=(4, 4), offload=(1, 0))))
    assert after.since(before).hooks == {"lookup": Spent(2, 4), "offload": Spent(1, 0)}
    assert after.since(before).control_us == 4


def test_rows_when_steps_and_requests_were_seen_then_costs_are_told_for_each():
    *hooks, total = rows(Costs(600, 50, {STEP: Spent(100, 200), REQUEST: Spent(10, 400)}))
    assert [row["hook"] for row in hooks] == [REQUEST, STEP]
    assert hooks[0]["us_a_call"] == 40 and hooks[1]["us_a_step"] == 2
    assert (total["us_a_step"], total["us_a_request"], total["dispatcher_us_a_request"]) == (6, 60, 5)


def test_rows_when_nothing_happened_then_no_division_fails():
    assert [row["hook"] for row in rows(Costs())] == ["all"]
