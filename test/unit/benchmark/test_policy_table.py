# SPDX-License-Identifier: Apache-2.0
"""The windows that policies are compared on."""

from pathlib import Path

import pytest

from benchmark import trace_replay
from benchmark.policy_table import TRACES, draw_of, grouped, trace_options


def asked(name, stretch, **seed):
    options = [*trace_options(name, Path("data"), stretch, **seed), "describe"]
    return trace_replay.build_parser().parse_args(options)


@pytest.mark.parametrize("name", TRACES)
def test_trace_when_stretched_then_only_its_pace_and_name_are_others(name):
    plain, slow = vars(asked(name, 1)), vars(asked(name, 2.5))
    assert slow.pop("time_scale") == pytest.approx(2.5 * plain.pop("time_scale"))
    assert (plain.pop("name"), slow.pop("name")) == (name, f"{name} x2.5")
    assert plain == slow


def test_trace_when_another_seed_draws_then_only_its_sessions_and_name_are_others():
    plain, other = vars(asked("mooncake", 2.5)), vars(asked("mooncake", 2.5, seed=3))
    assert (plain.pop("seed"), other.pop("seed")) == (1, 3)
    assert (plain.pop("name"), other.pop("name")) == ("mooncake x2.5", "mooncake seed 3 x2.5")
    assert plain == other


@pytest.mark.parametrize(("stretch", "seed"), [(1, 1), (1, 12), (2.5, 1), (2.5, 7)])
def test_name_when_taken_apart_then_the_trace_and_the_draw_it_was_made_of(stretch, seed):
    assert draw_of(asked("mooncake", stretch, seed=seed).name) == (asked("mooncake", stretch).name, seed)


def test_rows_when_traces_vary_then_each_stays_with_its_own():
    assert list(grouped([run("skewed x2"), run("mooncake seed 3"), run("mooncake"), run("unknown")])) == [
        (trace, "peer", "lmetric") for trace in ("mooncake", "mooncake seed 3", "skewed x2", "unknown")
    ]


def run(trace):
    return {"trace": trace, "label": "peer", "policy": "lmetric"}


def test_trace_when_it_is_a_file_then_below_the_folder():
    assert asked("mooncake", 1).trace == "data/mooncake/conversation_trace.jsonl.gz"
    assert asked("skewed", 1).trace == "skewed"
