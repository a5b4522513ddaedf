# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.planner import Action
from benchmark.planner_grid import Ask, Cell, Grid, WrongShape, plan_asks, summarise

HOLDER, READER = 0, 1


def cell(move_s, compute_s, moved, *, planned_s=0.0):
    return Cell("peer", 0, 64, 8, move_s=move_s, compute_s=compute_s, planned_s=[planned_s], planned_moved=[moved])


def test_verdict_when_the_faster_action_was_chosen_then_nothing_is_lost():
    verdict = cell([1.0, 1.1, 0.9], [2.0, 2.2, 1.9], 64).verdict()
    assert (verdict["choice"], verdict["is_fastest"], verdict["loss"]) == ("move", True, 0.0)
    assert verdict["gain_of_move"] == pytest.approx(0.5)


def test_verdict_when_the_slower_action_was_chosen_then_its_loss_and_the_spread_tell():
    verdict = cell([1.0, 1.0, 1.2], [1.1, 1.1, 1.1], 0).verdict()
    assert (verdict["choice"], verdict["is_fastest"], verdict["is_no_slower"]) == ("compute", False, True)
    assert verdict["loss"] == pytest.approx(0.1)
    assert not cell([1.0, 1.0, 1.0], [1.1, 1.1, 1.1], 0).verdict()["is_no_slower"]


@pytest.mark.parametrize(("planned_s", "loss"), [(0.8, 0.0), (1.2, 0.2)])
def test_verdict_when_a_part_was_moved_then_its_own_time_counts(planned_s, loss):
    verdict = cell([1.0], [1.5], 32, planned_s=planned_s).verdict()
    assert (verdict["choice"], verdict["is_fastest"]) == ("move a part", loss == 0)
    assert verdict["loss"] == pytest.approx(loss)


def test_summary_when_one_cell_of_four_was_wrong_then_its_share_and_loss():
    right = [cell([1.0], [2.0], 64)] * 3
    summary = summarise([*right, cell([1.0], [1.5], 0)])
    assert summary == {
        "num_cells": 4,
        "fastest_share": 0.75,
        "no_slower_share": 0.75,
        "largest_loss": pytest.approx(0.5),
    }


class FakeEngine:
    """Two ranks that hold whole prompts, and take what the wish says (without one: all) from the other."""

    def __init__(self):
        self.held = {READER: [], HOLDER: []}

    def prefill(self, token_ids, *, rank, action=None):
        device = self.longest(rank, token_ids)
        both = max(device, self.longest(1 - rank, token_ids))
        peer = 0 if action is Action.COMPUTE else both - device
        self.held[rank].append(list(token_ids))
        return {"cached_tokens_details": {"device": device, "peer": peer, "host": 0}}

    def longest(self, rank, token_ids):
        ends = range(16, len(token_ids), 16)
        return max((end for end in ends for held in self.held[rank] if held[:end] == token_ids[:end]), default=0)


@pytest.mark.parametrize("own", [0, 32])
def test_measure_when_a_cell_is_asked_then_each_action_gets_its_fresh_prompt(own):
    one = Cell("peer", own, 128, 8)
    grid = Grid(FakeEngine(), reader=READER, tiers=["peer"])
    for ask in plan_asks([one], 2, seed=0):
        grid.put(ask, rank=HOLDER)
        grid.measure(ask)
    assert (len(one.move_s), len(one.compute_s), len(one.planned_s)) == (2, 2, 2)
    assert one.planned_moved == [128, 128]


def test_plan_when_both_actions_take_nearly_as_long_then_they_are_asked_three_times_as_often():
    short, long = Cell("peer", 0, 64, 8), Cell("peer", 0, 128, 8)
    asks = plan_asks([short, long], 3, seed=0)
    assert [sum(ask.cell is cell for ask in asks) for cell in (short, long)] == [21, 9]
    assert len({tuple(ask.tokens) for ask in asks}) == len(asks)


def test_measure_when_the_server_does_something_else_then_the_figure_is_not_taken(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(engine, "longest", lambda rank, token_ids: 0)
    one = Cell("peer", 0, 64, 8)
    with pytest.raises(WrongShape, match="move"):
        Grid(engine, reader=READER, tiers=["peer"]).measure(Ask(one, Action.MOVE, [7] * 72))
    assert one.move_s == []


def test_measure_when_the_read_was_over_before_the_turn_then_its_pages_count_all_the_same(monkeypatch):
    engine = FakeEngine()
    details = {"cached_tokens_details": {"device": 0, "storage": 0, "host": 64}}
    monkeypatch.setattr(engine, "prefill", lambda token_ids, *, rank, action=None: details)
    one = Cell("store", 0, 64, 8)
    Grid(engine, reader=READER, tiers=["storage", "host"]).measure(Ask(one, Action.MOVE, [7] * 72))
    assert len(one.move_s) == 1
