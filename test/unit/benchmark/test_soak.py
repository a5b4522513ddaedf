# SPDX-License-Identifier: Apache-2.0
"""What makes a soak pass or fail, without a server."""

import json
import mmap
import os
from pathlib import Path

import pytest

from benchmark.soak import page, samples, traffic, verdict
from benchmark.soak.expected import (
    MIN_MARGIN,
    NUM_STEMS,
    NUM_TAILS,
    Known,
    complaint,
    known,
    logprob_complaint,
    margin,
    prompts,
)
from benchmark.soak.samples import LEFT_OVER, OF_RANKS, OF_STORES, ProcessSample, Sample
from benchmark.soak.tally import MAX_LISTED, Tally

KEPT = Path(__file__).parents[3] / "docs" / "benchmarks" / "soak.json"
KNOWN = Known(ids=(5, 6, 7), tokens=(1, 2, 3), text="abc", input_logprobs=(None, -1.0, -2.0))
NAME = "scheduler 1"
RANK = {**dict.fromkeys(OF_RANKS, 0), "num_pool_pages": 10, "num_free_pages": 10}


def sample(minute, own_kb=1000, *, shared_kb=500, num_fds=10, num_threads=4, ranks=None, failures=None, name=NAME):
    process = ProcessSample("scheduler", own_kb, own_kb + shared_kb, num_fds, num_threads)
    ranks = {"0": RANK} if ranks is None else ranks
    return Sample(minute * 60.0, minute * 100, {name: process}, ranks, failures or {}, 0)


def passed():
    tally = Tally()
    tally.compared("plain", "", 1.0)
    return tally


def flat():
    return [sample(minute) for minute in range(31)]


def test_soak_when_nothing_grows_and_all_is_right_then_it_is_passed():
    assert verdict.failures(passed(), flat(), []) == []


def test_soak_when_nothing_was_compared_then_it_is_not_passed():
    assert verdict.failures(Tally(), flat(), []) == ["no answer was compared"]


def test_soak_when_a_token_differs_or_an_error_came_then_the_first_is_told():
    tally = passed()
    tally.compared("plain", "token 0 differs", 2.0)
    tally.failed("chat", "500", 3.0)
    assert verdict.failures(tally, flat(), ["page left"]) == [
        "1 of 2 answers differ; the first: 2.0 s, plain: token 0 differs",
        "1 errors that stock would not give; the first: 3.0 s, chat: 500",
        "page left",
    ]


def test_memory_when_it_grows_by_more_than_three_in_a_hundred_behind_the_warm_up_then_it_is_told():
    grown = [sample(minute, 1000 + (minute > 20) * 31) for minute in range(31)]
    assert verdict.growth(grown) == ["scheduler 1: 1000 kB of its own became 1031 (+3.1%)"]
    assert verdict.growth([sample(minute, 1000 + (minute > 20) * 29) for minute in range(31)]) == []


def test_memory_when_what_is_shared_or_mapped_grows_then_it_is_told_by_itself():
    grown = [sample(minute, shared_kb=500 + (minute > 20) * 16) for minute in range(31)]
    assert verdict.growth(grown) == ["scheduler 1: 500 kB shared and mapped became 516 (+3.2%)"]
    assert verdict.growth([sample(minute, shared_kb=500 + (minute > 20) * 14) for minute in range(31)]) == []


def test_kept_soak_when_it_is_judged_as_today_then_nothing_grew():
    kept = json.loads(KEPT.read_text())["samples"]
    told = [one | {"processes": {name: ProcessSample(**own) for name, own in one["processes"].items()}} for one in kept]
    assert verdict.growth([Sample(**one) for one in told]) == []


def test_memory_when_it_grows_while_the_server_warms_up_or_for_a_moment_then_that_is_nothing():
    warming = [sample(minute, 500 if minute < 9 else 1000) for minute in range(31)]
    peak = [sample(minute, 5000 if minute == 29 else 1000) for minute in range(31)]
    assert verdict.growth(warming) == verdict.growth(peak) == []


@pytest.mark.parametrize(
    ("figure", "few", "many", "what"),
    [("num_fds", 26, 27, "descriptors"), ("num_threads", 6, 7, "threads")],
)
def test_descriptors_and_threads_when_they_become_many_more_then_it_is_told(figure, few, many, what):
    def grown(count):
        return verdict.growth([sample(minute, **({figure: count} if minute > 15 else {})) for minute in range(31)])

    assert grown(few) == []
    assert what in grown(many)[0]


def test_process_when_it_ends_then_it_is_told():
    assert verdict.growth([*flat(), sample(32, name="scheduler 2")])[0] == "scheduler 1 has ended"


def test_failures_when_a_rank_caught_some_then_they_are_told():
    caught = sample(31, ranks={"0": {**RANK, "num_failures": 2}}, failures={"linker.lookup": 2})
    assert verdict.hook_failures([*flat(), caught, sample(32, ranks={})]) == ["num_failures is 2: {'linker.lookup': 2}"]
    assert verdict.hook_failures([sample(0, ranks={})]) == ["the ranks have never said how they are"]


@pytest.mark.parametrize("figure", LEFT_OVER)
def test_ranks_when_they_still_hold_something_at_the_end_then_it_is_told(figure):
    assert verdict.unsettled({"0": RANK}) == []
    assert verdict.unsettled({"0": RANK, "1": {**RANK, figure: 3}}) == [f"left over at rank 1: {figure} is 3"]


def test_ranks_when_pages_are_missing_behind_a_flush_then_it_is_told():
    assert verdict.unreturned({"0": RANK}) == []
    held = {**RANK, "num_published_pages": 2, "num_free_pages": 9}
    assert len(verdict.unreturned({"0": held})) == 2


def test_answer_when_a_token_is_another_then_it_says_where():
    assert complaint(KNOWN, [1, 2, 3], is_whole=True) == ""
    assert "token 1 differs" in complaint(KNOWN, [1, 9, 3], is_whole=True)
    assert "token 2 differs" in complaint(KNOWN, [1, 2], is_whole=True)


def test_answer_when_it_was_cut_short_then_what_there_is_must_be_right():
    assert complaint(KNOWN, [1, 2], is_whole=False) == complaint(KNOWN, [], is_whole=False) == ""
    assert complaint(KNOWN, [2], is_whole=False)
    assert complaint(KNOWN, [1, 2, 3, 4], is_whole=False)


def test_log_probabilities_when_they_are_far_from_what_was_expected_then_it_is_told():
    assert logprob_complaint(KNOWN, 1, [[None, 6], [-2.0001, 7]]) == ""
    assert "0.00200" in logprob_complaint(KNOWN, 1, [[None, 6], [-2.002, 7]])
    assert logprob_complaint(KNOWN, 0, [[None, 5]]) == "1 log probabilities of 3"


def test_prompt_when_a_server_was_in_doubt_about_it_then_its_margin_is_narrow():
    sure, unsure = [[-0.1, 1], [-3.0, 2]], [[-1.0, 1], [-1.0 - MIN_MARGIN / 2, 2]]
    assert margin({"output_top_logprobs": [sure, unsure]}) < MIN_MARGIN < margin({"output_top_logprobs": [sure]})
    told = {"output_ids": [1, 2, 3], "text": "abc", "meta_info": {"input_token_logprobs": [[None, 5], [-1.0, 6]]}}
    assert known([5, 6], told, None) == Known((5, 6), (1, 2, 3), "abc", (None, -1.0))


def test_prompts_when_made_then_they_share_beginnings_and_the_seed_decides():
    made = prompts(1)
    assert made == prompts(1) != prompts(2)
    assert len({tuple(ids[:48]) for ids in made}) == NUM_STEMS
    assert len({tuple(ids) for ids in made}) == NUM_STEMS * NUM_TAILS


def test_complaints_when_there_are_too_many_then_all_are_counted_and_some_are_kept():
    tally = Tally()
    for number in range(3 * MAX_LISTED):
        tally.failed("plain", "x" * 10_000, float(number))
        tally.answered("plain", "500")
    assert (tally.num_errors, len(tally.errors), tally.num_requests) == (3 * MAX_LISTED, MAX_LISTED, 3 * MAX_LISTED)
    assert max(map(len, tally.errors)) < 1000


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("regex", "aba-7", "aba-"),
        ("ebnf", "yes", "yesno"),
        ("json_schema", '{"a": true}', '{"a": 1}'),
        ("json_schema", '{"a":false}', "{"),
    ],
)
def test_text_when_it_does_not_have_the_form_that_was_asked_for_then_it_does_not_fit(field, right, wrong):
    assert traffic.fits(field, right) and not traffic.fits(field, wrong)


def test_processes_when_sampled_then_their_own_memory_is_counted_and_the_dead_are_left_out():
    before = next(iter(samples.processes([os.getpid(), 2**22 + 1]).values()))
    # Of its own: what the allocator gives may have been this process's before.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mine:
        mine.write(bytes([1]) * len(mine))
        after = next(iter(samples.processes([os.getpid()]).values()))
    assert after.anonymous_kb - before.anonymous_kb > 20_000
    assert before.num_fds > 2 and before.num_threads >= 1


def test_ranks_when_they_say_how_they_are_then_figures_of_ranks_and_stores_are_taken():
    banyan = {**RANK, "dp_rank": 1, "store": dict.fromkeys(OF_STORES, 4), "hook_failures": {"linker.lookup": 2}}
    info = {"internal_states": [{"banyan": banyan}, {"banyan": {**banyan, "dp_rank": 0}}]}
    assert samples.ranks(info)["1"]["store_num_records"] == 4
    assert samples.failures(info) == {"linker.lookup": 4}


def test_ranks_when_they_have_no_store_then_the_page_has_the_other_figures(tmp_path):
    alone = samples.ranks({"internal_states": [{"banyan": {**RANK, "dp_rank": 0}}]})
    assert not any(name.startswith("store_") for name in alone["0"])
    page.write(tmp_path / "report.html", passed(), [sample(minute, ranks=alone) for minute in range(3)], [])
    assert "rank 0" in page.by_rank([sample(0, ranks=alone)], *alone["0"]).popitem()[0]


def test_page_when_written_then_it_has_the_verdict_and_a_picture_of_each_figure(tmp_path):
    stored = {**RANK, **{f"store_{name}": 1 for name in OF_STORES}}
    tally = passed()
    tally.failed("chat", "<b>", 1.0)
    page.write(tmp_path / "report.html", tally, [sample(minute, ranks={"0": stored}) for minute in range(3)], ["<bad>"])
    text = (tmp_path / "report.html").read_text()
    assert "&lt;bad&gt;" in text and "<b>" not in text
    assert text.count('id="axes_') == len(page.PLOTS)
