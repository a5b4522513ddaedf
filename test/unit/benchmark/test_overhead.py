# SPDX-License-Identifier: Apache-2.0
"""What rounds of on and off say together, and which figures are beyond their bounds."""

from __future__ import annotations

import pytest

from banyan import patches
from banyan_lab.bench.hooks import REQUEST, STEP, Costs, Spent
from benchmark.overhead import kept, page, verdict
from benchmark.overhead.cases import CASES, POOL_TOKENS, prompts
from benchmark.overhead.play import EACH_STEP, Round, step_s
from benchmark.records import Answer

PROMPTS_512 = next(case for case in CASES if case.prompt_tokens == 512)
STREAMS = next(case for case in CASES if case.is_of_streams)


def one(case, *, ttft_s=0.1, step_s=0.01, requests_per_s=10.0, control_us=400, hooks=None):
    hooks = {STEP: Spent(100, 200), REQUEST: Spent(10, 100)} if hooks is None else hooks
    return Round(
        requests_per_s=requests_per_s,
        ttft_s=ttft_s,
        step_s=step_s if case.is_of_streams else None,
        cpu_us={"scheduler": 1000.0, "dispatcher": 100.0},
        num_requests=10,
        costs=Costs(control_us, 500, hooks),
    )


@pytest.mark.parametrize("case", [PROMPTS_512, STREAMS])
def test_case_when_on_is_as_off_then_nothing_is_above(case):
    row = verdict.compared(case, [one(case)] * 3, [one(case)] * 3)
    assert row["above"] == []
    assert row["throughput"] == {"median": 1.0, "min": 1.0, "max": 1.0, "values": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("case", "slow", "named"),
    [
        (PROMPTS_512, {"requests_per_s": 9.0}, "throughput"),
        (PROMPTS_512, {"ttft_s": 0.2}, "ttft"),
        (STREAMS, {"step_s": 0.02}, "step"),
        (STREAMS, {"ttft_s": 0.2}, "ttft"),
        (PROMPTS_512, {"control_us": 700}, "scheduler_us"),
        (STREAMS, {"hooks": {STEP: Spent(100, 900)}}, "scheduler_step_us"),
        (PROMPTS_512, {"hooks": {"linker.lookup": Spent(2, 200)}}, "linker.lookup takes 100 us a call"),
    ],
)
def test_case_when_a_figure_is_beyond_its_bound_then_it_is_named(case, slow, named):
    row = verdict.compared(case, [one(case, **slow)] * 3, [one(case)] * 3)
    assert any(line.startswith(named) for line in row["above"]), row["above"]


def test_ratios_when_rounds_differ_then_each_is_compared_with_its_own_turn():
    on = [one(PROMPTS_512, ttft_s=ttft_s) for ttft_s in (0.1, 0.3)]
    off = [one(PROMPTS_512, ttft_s=ttft_s) for ttft_s in (0.1, 0.2)]
    ratio = verdict.compared(PROMPTS_512, on, off)["ttft"]
    assert ratio == {
        "median": pytest.approx(1.25),
        "min": pytest.approx(1.0),
        "max": pytest.approx(1.5),
        "values": pytest.approx([1.0, 1.5]),
    }


def test_step_when_tokens_are_read_together_then_it_is_their_share_of_the_whole_time():
    """A client that gets no core finds many events at once: their gaps are microseconds."""
    answer = Answer(ttft_s=1.0, latency_s=2.0, itl_s=[1e-6] * 9 + [1.0], output_ids=list(range(11)))
    assert step_s(answer) == pytest.approx(0.1)


@pytest.mark.parametrize("answer", [Answer(ttft_s=1.0, latency_s=2.0, output_ids=[5]), Answer(output_ids=[5, 6])])
def test_step_when_no_token_followed_the_first_then_there_is_none(answer):
    assert step_s(answer) is None


def test_table_when_it_is_made_then_the_command_is_that_of_the_run():
    row = verdict.compared(STREAMS, [one(STREAMS)] * 2, [one(STREAMS)] * 2)
    where = {"commit": "abc", "date": "2026-11-28", "hardware": {"cpu_model": "A processor", "num_cores": 2}}
    config = {"ranks": [1], "rounds": 2, "case": ["1 stream"], "seed": 7, "out": "overhead"}
    text = kept.page({"by_ranks": {"1": [row]}, "config": config, "provenance": where})
    assert "`python -m benchmark.overhead --ranks 1 --rounds 2 --case '1 stream' --seed 7`" in " ".join(text.split())


def test_hooks_of_each_step_when_they_are_looked_for_then_the_queue_has_them():
    queue = {f"{patch.feature}.{patch.name}" for patch in patches.load_queue()}
    assert {name for name in EACH_STEP if name.split(".")[1][:1].isdigit()} | {REQUEST} <= queue


def test_pools_when_trees_are_full_then_the_longest_prompt_has_room():
    assert max(case.prompt_tokens for case in CASES) < POOL_TOKENS


def test_prompts_when_seeds_differ_then_no_two_begin_alike():
    drawn = [tuple(prompt[:16]) for seed in range(20) for prompt in prompts(seed, 20, 64)]
    assert len(set(drawn)) == len(drawn)


def test_page_when_a_figure_is_above_then_it_says_so():
    row = verdict.compared(PROMPTS_512, [one(PROMPTS_512, ttft_s=0.2)], [one(PROMPTS_512)])
    text = page.write_rows({1: [row], 2: [verdict.compared(STREAMS, [one(STREAMS)], [one(STREAMS)])]})
    assert "ttft is 2.000" in text and "2 ranks" in text and "linker.num_completed_offloads" in text
