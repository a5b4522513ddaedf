# SPDX-License-Identifier: Apache-2.0
"""The table of classes and of turns that change their rank."""

from benchmark.policy_classes import class_table


def run(warm_s, *, moved_s=None, most_tokens=None):
    times = {"warm": {"mean": warm_s}, "medium": None, "heavy": {"mean": 3.0}}
    read_queues = {} if most_tokens is None else {"read_queues": {"most_tokens": most_tokens}}
    return {
        "by_class": {name: {"ttft_s": ttft_s} for name, ttft_s in times.items()},
        "follow_ups": {
            "stayed": {"num_requests": 4, "ttft_s": {"mean": 1.0}},
            "moved": {"num_requests": 2 * (moved_s is not None), "ttft_s": moved_s and {"mean": moved_s}},
        },
        "cached_by_source": {"storage": 25},
        "prompt_tokens": 100,
        **read_queues,
    }


def test_table_when_runs_are_repeated_then_a_row_of_medians_for_each_policy():
    runs = [run(1.0, moved_s=2.0, most_tokens=64), run(5.0, moved_s=4.0, most_tokens=320), run(2.0, most_tokens=0)]
    lines = class_table({("t", "store", "lmetric"): runs, ("t", "peer", "lmetric"): [run(1.0)]}).splitlines()
    assert len(lines) == 4
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:7] == ["t", "store", "lmetric", "3", "2.00 (1.00-5.00)", "-", "3.00 (3.00-3.00)"]
    assert cells[7:] == ["4, 1.00 (1.00-1.00)", "2, 3.00 (2.00-4.00)", "25.0 %", "320"]
    assert [cell.strip() for cell in lines[3].strip("|").split("|")][-3:] == ["0, -", "25.0 %", "-"]


def test_table_when_runs_were_recorded_before_turns_were_followed_then_they_are_left_out():
    old = {key: value for key, value in run(1.0).items() if key != "follow_ups"}
    assert len(class_table({("t", "peer", "lmetric"): [old]}).splitlines()) == 2
