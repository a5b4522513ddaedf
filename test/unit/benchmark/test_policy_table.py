# SPDX-License-Identifier: Apache-2.0
"""The windows that policies are compared on."""

from pathlib import Path

import pytest

from benchmark import trace_replay
from benchmark.policy_table import TRACES, trace_options


def asked(name, stretch):
    options = [*trace_options(name, Path("data"), stretch), "describe"]
    return trace_replay.build_parser().parse_args(options)


@pytest.mark.parametrize("name", TRACES)
def test_trace_when_stretched_then_only_its_pace_and_name_are_others(name):
    plain, slow = vars(asked(name, 1)), vars(asked(name, 2.5))
    assert slow.pop("time_scale") == pytest.approx(2.5 * plain.pop("time_scale"))
    assert (plain.pop("name"), slow.pop("name")) == (name, f"{name} x2.5")
    assert plain == slow


def test_trace_when_it_is_a_file_then_below_the_folder():
    assert asked("mooncake", 1).trace == "data/mooncake/conversation_trace.jsonl.gz"
    assert asked("skewed", 1).trace == "skewed"
