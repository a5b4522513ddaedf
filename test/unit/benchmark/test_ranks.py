# SPDX-License-Identifier: Apache-2.0
"""More ranks, more load: prompts that fit, rows that compare on with off within a repetition, and the page's table."""

import json

from benchmark import ranks, ranks_page
from benchmark.measure import RunResult
from benchmark.workload.conversation import Message

RUN = {"config": {"repetitions": 2}, "sizes": {"prompt_tokens": 600, "output_tokens": 12, "model": "wide"}} | {
    "provenance": {
        "commit": "0123456789abcdef",
        "date": "2026-11-23T08:00:00+00:00",
        "hardware": {"cpu_model": "A processor", "num_cores": 2},
    }
}


def result(label, repetition, run, *, ttft_s, share, num_errors=0):
    def spread(value):
        return {"mean": value, "p50": value, "p90": value, "p99": value}

    summary = {
        "ttft_s": spread(ttft_s),
        "latency_s": spread(1.0),
        "time_per_output_token_ms": spread(20.0 if label == "on" else 10.0),
        "latency_per_token_ms": spread(1.0),
        "inter_token_latency_ms": spread(1.0),
        "total_time_s": 4.0,
        "completed_per_s": 2.0,
        "prompt_tokens": 600,
        "served_tokens": 612,
        "cached_tokens": 0,
        "cached_share": share,
        "cached_by_source": {"peer": 0},
        "num_errors": num_errors,
    }
    return RunResult(label, run, repetition, [], [], summary)


RESULTS = [
    result("off", 1, 1, ttft_s=1.0, share=0.0),
    result("off", 1, 2, ttft_s=1.0, share=0.25),
    result("on", 1, 1, ttft_s=1.1, share=0.0),
    result("on", 1, 2, ttft_s=0.1, share=0.98, num_errors=1),
    result("on", 2, 1, ttft_s=2.0, share=0.0),
    result("on", 2, 2, ttft_s=0.6, share=0.98),
    result("off", 2, 1, ttft_s=2.0, share=0.0),
    result("off", 2, 2, ttft_s=2.0, share=0.25),
]


def test_prompts_when_the_load_is_the_highest_then_every_rank_has_its_share_and_room_for_all():
    assert ranks.num_prompts_at(8, 16) >= 8 * 16
    assert ranks.num_prompts_at(1, 1) == ranks.MIN_PROMPTS
    needed = ranks.num_prompts_at(8, 16) * (ranks.PROMPT_TOKENS + ranks.OUTPUT_TOKENS)
    assert ranks.pool_tokens(8, [1, 16]) > needed


def test_prompts_when_they_are_made_again_then_they_are_the_same_and_share_nothing():
    prompts, again = ranks.prompts_of(3, seed=1), ranks.prompts_of(3, seed=1)
    asked = [prompts.chat_ids([Message("user", script.id)]) for script in prompts.scripts]
    assert asked == [again.chat_ids([Message("user", script.id)]) for script in again.scripts]
    assert len({tuple(ids[: ranks.PAGE_TOKENS]) for ids in asked}) == 3
    assert [script.prompt_len for script in prompts.scripts] == [ranks.PROMPT_TOKENS] * 3


def test_row_when_the_machine_drifts_then_ratios_are_within_a_repetition():
    row = ranks.row_of(4, 1, RESULTS)
    assert row["ttft_ratios"][1]["values"] == [1.1, 1.0]
    assert row["ttft_ratios"][2]["values"] == [0.1, 0.3]
    assert row["latency_ratios"][1]["values"] == [1.0, 1.0]
    assert row["tpot_p90_ratio"]["values"] == [2.0] * 4
    assert row["num_errors"] == 1


def test_page_when_a_run_is_kept_then_its_rows_say_what_was_found():
    rows = json.loads(json.dumps([ranks.row_of(4, 1, RESULTS)]))
    lines = ranks_page.page({**RUN, "rows": rows}).splitlines()
    assert lines[2] == (
        "| 4 | 1 | 32 | 25.0%, 98.0% | 1.05 (1.00-1.10) | 1.00 (1.00-1.00) | 0.20 (0.10-0.30) | 1.50 s, 0.35 s "
        "| 2.00 (2.00-2.00) | 2.0, 2.0 | 1 |"
    )
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    told = " ".join(lines)
    assert "commit 0123456789, 2026-11-23, A processor with 2 cores" in told
    assert "The model `wide` of `benchmark/modes/models.py`, with random weights; prompts of 600 tokens" in told
