# SPDX-License-Identifier: Apache-2.0
"""What a step of ``make gpu-check`` under load holds to be shown, and that it puts a server under load."""

import argparse
import importlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from test.gpu.engine import Answer
from test.gpu.under_load import Run, changed, verdict

GAP_S = 0.01


def answer(number, *, token=7, gap_s=GAP_S, cached=16):
    return Answer((number,), [token] * 4, 64, cached, {"peer": cached}, 0.1, 0, (gap_s,) * 3)


def run(answers=None, *, wait_us=0):
    return Run(answers or [answer(number) for number in range(40)], took_s=10.0, wait_us=wait_us, num_ranks=2)


def judged(shared, *, first=None, second=None):
    found = verdict(first or run(), second or run(), shared, num_answers=40, num_tokens=4)
    return [name for name, holds in found.items() if not holds]


@pytest.mark.parametrize(
    ("shared", "broken"),
    [
        (run(), []),
        (run(wait_us=300_000), ["allocations_hardly_wait"]),
        (run([answer(n, gap_s=3 * GAP_S) for n in range(40)]), ["tokens_come_as_fast", "no_token_comes_much_later"]),
        (run([answer(n, gap_s=0.1 if n == 5 else GAP_S) for n in range(40)]), ["no_token_comes_much_later"]),
        (run([answer(n, cached=0) for n in range(40)]), ["pages_came_from_elsewhere"]),
        (run([answer(n) for n in range(39)]), ["every_turn_was_answered"]),
        (
            run([answer(n, token=8 if n < 20 else 7) for n in range(40)]),
            ["no_more_answers_change_than_between_two_runs_without_sharing"],
        ),
    ],
    ids=["as without", "allocations wait", "slow", "one stall", "no page came", "a turn is missing", "other tokens"],
)
def test_verdict_when_sharing_costs_something_under_load_then_that_condition_does_not_hold(shared, broken):
    assert judged(shared) == broken


def test_verdict_when_batches_alone_change_as_many_answers_then_sharing_is_not_blamed():
    others = run([answer(n, token=8 if n < 20 else 7) for n in range(40)])
    assert judged(others, second=others) == []


def test_changed_when_an_answer_made_the_next_prompt_another_then_it_counts_once():
    first = run([answer(1), answer(2)])
    assert changed(first, run([answer(1, token=8), answer(99)])) == 1.0
    assert changed(first, run([answer(99)])) == 0.0


class FakeServer:
    """Answers nobody before two conversations have talked to it at once, or the test has waited for long."""

    num_made = 0

    def __init__(self, model_path, *, further, **rest):
        FakeServer.num_made += 1
        self.further, self.asked, self.emptied = further, [], 0
        self.talking: set[int] = set()
        self.together = threading.Event()
        self.wait_us = 0

    def wait_until_up(self, seconds):
        pass

    def call(self, path, **body):
        self.emptied += path.startswith("/flush_cache")

    def rank_states(self):
        return [{"alloc_wait_us": self.wait_us}, {"alloc_wait_us": self.wait_us}]

    def generate(self, ids, rank):
        self.talking.add(threading.get_ident())
        if len(self.talking) > 1:
            self.together.set()
        self.together.wait(10)
        self.asked.append((len(ids), rank))
        self.wait_us += 1
        return replace(answer(len(self.asked)), prompt=tuple(ids))

    def stop(self):
        self.further = None


@pytest.fixture
def load_check(monkeypatch):
    """The script: it finds what lies beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    script = importlib.import_module("load_check")
    monkeypatch.setattr(script, "Server", FakeServer)
    return script


@pytest.mark.parametrize(("share", "step"), [("off", 0), ("peer", 1)])
def test_load_when_a_server_is_put_under_it_then_conversations_talk_at_once_and_each_turn_where_it_is_to(
    load_check, tmp_path, share, step
):
    made = []
    original = load_check.Server
    load_check.Server = lambda *args, **named: made.append(original(*args, **named)) or made[-1]
    args = argparse.Namespace(
        model_path="m", seconds=1, log=tmp_path, all_gpus=False, conversations=4, further=["--page-size", "16"]
    )
    (done,) = load_check.serve(args, share, step=step, num_runs=1)
    assert len(done.answers) == 4 * load_check.NUM_TURNS and done.wait_us > 0 and made[0].emptied == 2
    assert made[0].together.is_set() and made[0].further is None, "it was stopped"
    first = [rank for _, rank in made[0].asked]
    assert set(first) == {0, 1}
    prompts = [list(each.prompt) for each in done.answers[: load_check.NUM_TURNS]]
    assert prompts[1][: len(prompts[0])] == prompts[0], "a turn follows the one before"


def rows(**changes):
    known = {"copy": 0.4, "up": 0.9, "down": 0.9, "launch": 40.0, "wait": 3.0, **changes}
    return [
        {"what": "hardware"},
        {"what": "copy", "shape": "8B", "num_programs": 16, "ratio": 0.01},
        {"what": "copy", "shape": "8B", "num_programs": 64, "ratio": known["copy"]},
        *({"what": f"arena {way}", "engine": "kernel", "ratio": known[way]} for way in ("up", "down")),
        {"what": "arena up", "engine": "batched copies", "error": "CUDA 12.4"},
        {"what": "launch of one layer, one page", "caller_us": known["launch"]},
        {"what": "wait for a layer that has landed", "caller_us": known["wait"]},
    ]


@pytest.mark.parametrize(
    ("changes", "num_broken"),
    [({}, 0), ({"copy": 0.05}, 1), ({"down": 0.3}, 1), ({"launch": 900.0}, 1), ({"wait": 90.0}, 1)],
)
def test_bench_when_a_figure_would_make_sharing_pointless_then_the_step_fails(monkeypatch, changes, num_broken):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    found = importlib.import_module("bench_check").verdict(rows(**changes))
    assert list(found.values()).count(False) == num_broken
