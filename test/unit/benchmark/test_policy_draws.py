# SPDX-License-Identifier: Apache-2.0
"""What several draws say together: pooled over the draws both played, and honest about how little few of them tell."""

import numpy as np
import pytest

from benchmark.policy_draws import DEFAULT, draws_table, ratio_over_draws

OTHER = ("index", "round_robin")


def requests(cell, draw, times):
    label, policy = cell
    return [{"trace": f"t {draw}", "label": label, "policy": policy, "ttft_s": time} for time in times]


def draw_of(name):
    trace, _, draw = name.partition(" ")
    return trace, int(draw)


def rows(lines):
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in draws_table(lines, draw_of).splitlines()[2:]
    ]


def test_draws_when_both_played_them_then_pooled_and_compared():
    lines = [*requests(DEFAULT, 1, [1.0, 1.0]), *requests(DEFAULT, 2, [4.0])]
    lines += [*requests(OTHER, 1, [2.0, 2.0]), *requests(OTHER, 2, [8.0])]
    (first, second) = rows(lines)
    assert first == ["t", *DEFAULT, "2", "3", "2.00", "3.40", "1", "1"]
    assert second == ["t", *OTHER, "2", "3", "4.00", "6.80", "2.00 (2.00-2.00)", "2.00 (2.00-2.00)"]


def test_draws_when_only_one_side_played_one_then_it_does_not_count():
    lines = [line for draw in (1, 2, 3) for line in requests(DEFAULT, draw, [1.0])]
    lines += [*requests(OTHER, 1, [1.0]), *requests(OTHER, 2, [1.0]), *requests(OTHER, 4, [100.0])]
    assert rows(lines)[1][3:] == ["2", "2", "1.00", "1.00", "1.00 (1.00-1.00)", "1.00 (1.00-1.00)"]


def test_draws_when_there_is_one_then_no_row():
    assert rows([*requests(DEFAULT, 1, [1.0]), *requests(OTHER, 1, [2.0])]) == []


def test_draws_when_a_request_failed_then_it_has_no_time():
    lines = [*requests(DEFAULT, 1, [1.0, None]), *requests(DEFAULT, 2, [1.0])]
    assert rows(lines)[0][4] == "2"


def test_ratio_when_draws_disagree_then_its_interval_holds_one():
    ours, theirs = [[1.0], [2.0], [1.0], [2.0]], [[2.0], [1.0], [2.0], [1.0]]
    ratio, (low, high) = ratio_over_draws(np.mean, ours, theirs)
    assert ratio == pytest.approx(1.0)
    assert low < 0.8 < 1.25 < high


def test_ratio_when_every_draw_agrees_then_its_interval_excludes_one():
    draws = [[1.0, 3.0], [2.0], [5.0], [0.5]]
    ratio, (low, high) = ratio_over_draws(np.mean, [[1.2 * time for time in draw] for draw in draws], draws)
    assert (ratio, low, high) == (pytest.approx(1.2),) * 3
