# SPDX-License-Identifier: Apache-2.0
"""What Banyan costs where it cannot help: prompts nobody has seen, and ratios beside those of equal servers."""

from benchmark import first_run
from benchmark.compare import TIMES, TOTALS
from benchmark.measure import RunResult
from benchmark.workload.conversation import Message


def result(label, repetition, ttft_s):
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft_s)
    summary = {
        **dict.fromkeys(TIMES, times),
        **dict.fromkeys(TOTALS, 1.0),
        **{"cached_by_source": {}, "num_errors": label == "stock"},
    }
    return RunResult(label, 1, repetition, [], [], summary)


def test_prompts_when_they_are_made_then_they_have_their_length_and_share_no_page():
    prompts = first_run.prompts_of(3, 570, seed=1)
    asked = [prompts.chat_ids([Message("user", script.id)]) for script in prompts.scripts]
    assert [len(ids) for ids in asked] == [570] * 3
    assert len({tuple(ids[:16]) for ids in asked}) == 3


def test_row_when_the_machine_drifts_then_ratios_are_within_a_repetition():
    times = {"off": (1.0, 2.0), "on": (1.1, 2.0), "off_again": (1.0, 2.2), "stock": (0.9, 1.8)}
    row = first_run.row_of(570, [result(label, n + 1, t) for label, both in times.items() for n, t in enumerate(both)])
    assert row["ttft_ratios"]["on"]["values"] == [1.1, 1.0]
    assert row["ttft_ratios"]["off_again"]["values"] == [1.0, 1.1]
    assert row["latency_ratios"]["stock"]["median"] == 0.9
    assert row["num_errors"] == 2
