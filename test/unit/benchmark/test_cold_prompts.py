# SPDX-License-Identifier: Apache-2.0
"""What the measurement of cold prompts sends, and what it makes of the answers."""

from __future__ import annotations

from contextlib import nullcontext

from benchmark import cold_prompts
from benchmark.cold_prompts import BASE, figures, main, verdicts, work
from benchmark.records import Answer

SOME = work(num_requests=100, num_heads=3, tokens=64, share_cold=0.05, per_s=2.0, seed=1)


def test_work_when_drawn_twice_then_it_is_the_same_and_one_in_twenty_is_cold():
    assert work(num_requests=100, num_heads=3, tokens=64, share_cold=0.05, per_s=2.0, seed=1) == SOME
    assert sum(SOME.is_cold) == 5 and list(SOME.at_s) == sorted(SOME.at_s)


def test_prompts_when_cold_then_they_begin_as_no_other_and_warm_ones_as_a_head():
    heads = set(SOME.heads)
    for prompt, is_cold in zip(SOME.prompts, SOME.is_cold, strict=True):
        assert len(prompt) == 64 and (prompt[:60] in heads) is not is_cold


def answers(cold_s, warm_s):
    times = [cold_s if is_cold else warm_s for is_cold in SOME.is_cold]
    return [Answer(ttft_s=each, prompt_tokens=64, cached_tokens=32) for each in times]


def test_figures_when_cold_prompts_wait_then_their_share_of_all_time_is_told():
    found = figures(SOME, answers(57.0, 1.0))
    assert found["cold_share_of_ttft"] == 0.75 and found["cached_share"] == 0.5 and not found["num_errors"]
    assert (found["cold_ttft_s"]["p99"], found["warm_ttft_s"]["p50"]) == (57.0, 1.0)


def test_verdicts_when_arms_were_repeated_then_ratios_are_within_each_and_lpm_beside_its_own_arm():
    runs = [
        {"arm": arm, **figures(SOME, answers(cold_s * factor, warm_s))}
        for factor, shared_s in ((0.5, 30.0), (1.0, 20.0), (2.0, 10.0))
        for arm, cold_s, warm_s in ((BASE, 10.0, 1.0), ("banyan", 5.0, 0.8), ("banyan, lpm", shared_s, 0.4))
    ]
    found = verdicts(runs)["banyan, lpm"]
    assert [found["cold_p99_to_round_robin"][key] for key in ("median", "min", "max")] == [2.0, 1.0, 3.0]
    assert (found["warm_p50_to_plain"]["median"], found["warm_p50_to_round_robin"]["median"]) == (0.5, 0.4)


def test_verdicts_when_an_arm_is_asked_for_without_its_base_then_there_is_no_ratio():
    found = verdicts([{"arm": "banyan, lpm", **figures(SOME, answers(2.0, 1.0))}])
    assert set(found["banyan, lpm"].values()) == {None}


def test_arms_when_they_are_repeated_then_another_one_is_first(monkeypatch, tmp_path):
    async def play(url, some):
        return [Answer(ttft_s=1.0) for _ in some.prompts]

    written = []
    monkeypatch.setattr(cold_prompts, "serving", lambda *_: nullcontext("http://server"))
    monkeypatch.setattr(cold_prompts, "play", play)
    monkeypatch.setattr(cold_prompts, "ensure_model", lambda _: tmp_path)
    monkeypatch.setattr(cold_prompts, "unwind_on_sigterm", lambda: None)
    monkeypatch.setattr(cold_prompts, "write_report", lambda path, report, args: written.extend(report["runs"]))
    assert main(["--requests", "20", "--tokens", "16", "--repetitions", "2", "--arm", "round robin", "router"]) == 0
    assert [run["arm"] for run in written] == ["round robin", "router", "router", "round robin"]
