# SPDX-License-Identifier: Apache-2.0
"""Faults in mid-pull: they go on until enough pulls were cut, and the slowest counts."""

import random
from types import SimpleNamespace

import pytest

from benchmark import remote_faults

CONTROLS = [
    {"remote_s": 0.1, "compute_s": 0.8},
    {"remote_s": 0.2, "compute_s": 1.0},
    {"remote_s": 0.1, "compute_s": 1.2},
]


def row(how, took_s, *, num_cut=1, is_identical=True):
    return {"how": how, "took_s": took_s, "num_cut": num_cut, "is_identical": is_identical}


ROWS = [row("kill", 1.4), row("kill", 1.9), row("kill", 9.0, num_cut=0), row("stop", 3.9)]


def test_summary_when_a_fault_found_no_pull_then_its_time_does_not_count():
    found = remote_faults.summarise(ROWS, CONTROLS)
    assert found["outputs_identical"] and found["compute_s"] == 1.0 and found["remote_s"] == 0.1
    assert found["kill"]["num_tries"] == 3 and found["kill"]["num_cut"] == 2
    assert found["kill"]["extra_s"]["max"] == pytest.approx(0.9) and found["kill"]["is_in_time"]
    assert found["stop"]["extra_s"]["max"] == pytest.approx(2.9) and found["stop"]["is_in_time"]


@pytest.mark.parametrize(
    "late", [[row("kill", 2.1)], [row("kill", 1.0, num_cut=0)]], ids=["one is late", "none was cut"]
)
def test_summary_when_a_kind_is_late_or_was_never_cut_then_it_is_not_in_time(late):
    assert not remote_faults.summarise([*late, row("stop", 1.0)], CONTROLS)["kill"]["is_in_time"]


def test_summary_when_an_answer_differs_then_it_says_so():
    assert not remote_faults.summarise([*ROWS, row("stop", 1.0, is_identical=False)], CONTROLS)["outputs_identical"]


class FakeNodes:
    """Every second fault cuts a pull."""

    def __init__(self, cuts):
        self.borrower = self
        self.done = []
        self._cuts, self._num_lost = iter(cuts), 0

    def lend(self, ids):
        self.done.append("lend")
        return [1, 2]

    def generate(self, ids, **asked):
        return {"output_ids": [1, 2]}

    def ranks(self):
        return {0: {"nodes": {"num_lost_pulls": self._num_lost}}}

    def _fail(self):
        self._num_lost += next(self._cuts)
        self.done.append("fail")

    kill_lender = stop_lender = _fail

    def start_lender_again(self):
        self.done.append("again")

    def wake_lender(self):
        self.done.append("awake")


class FakePath:
    """Of every prompt all bytes come at once, or none."""

    def __init__(self, comes=True):
        self._comes = comes

    def at(self, num_bytes, action):
        assert 0 < num_bytes < 1000
        if self._comes:
            action()
        return SimpleNamespace(settle=lambda: self._comes)


@pytest.fixture
def rows(tmp_path):
    return remote_faults.Rows(tmp_path / "faults.jsonl", "c")


def cut(nodes, rows, how, num_faults, path=None):
    remote_faults.cut_pulls(nodes, path or FakePath(), how, num_faults, 1000, random.Random(1), rows)
    return rows.of(how)


@pytest.mark.parametrize("how, restored", [("kill", "again"), ("stop", "awake")])
def test_faults_when_some_find_no_pull_then_it_is_tried_until_enough_were_cut(rows, how, restored):
    nodes = FakeNodes([0, 1, 0, 1])
    found = cut(nodes, rows, how, 2)
    assert [row["num_cut"] for row in found] == [0, 1, 0, 1] and all(row["is_identical"] for row in found)
    assert nodes.done == ["lend", "fail", restored, "lend"] * 4


def test_faults_when_no_pull_is_ever_found_then_it_ends(rows):
    assert len(cut(FakeNodes([0] * 100), rows, "stop", 2)) == 2 * remote_faults.MOST_TRIES


def test_faults_when_nothing_is_pulled_then_nobody_is_killed_and_nobody_started(rows):
    nodes = FakeNodes([])
    found = cut(nodes, rows, "kill", 1, FakePath(comes=False))
    assert [row["num_cut"] for row in found] == [0] * remote_faults.MOST_TRIES
    assert nodes.done == ["lend"] * remote_faults.MOST_TRIES


def test_rows_when_a_run_was_interrupted_then_the_next_one_of_this_commit_goes_on(tmp_path, rows):
    cut(FakeNodes([1]), rows, "kill", 1)
    again = remote_faults.Rows(tmp_path / "faults.jsonl", "c")
    assert len(cut(FakeNodes([1]), again, "kill", 2)) == 2
    assert remote_faults.Rows(tmp_path / "faults.jsonl", "another").of("kill") == []
    again.end()
    assert remote_faults.Rows(tmp_path / "faults.jsonl", "c").of("kill") == []
