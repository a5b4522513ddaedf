# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from benchmark import pd_combined
from benchmark.pd_combined import QUICK, Sizes
from benchmark.pd_page import COMBINED_RATIOS, combined_page
from benchmark.records import Answer


def answer(**fields):
    return Answer(**{"ttft_s": 0.5, "itl_s": [0.1, 0.3], "completion_tokens": 3, **fields})


def row(kind, number, tokens_per_s, **fields):
    others = {"ttft_s": 1.0, "itl_s": 0.1, "itl_p99_s": 0.2}
    cell = {"prompt_tokens": 128, "in_flight": 2}
    return {**cell, "round": number, "kind": kind, "tokens_per_s": tokens_per_s, **others, **fields}


def test_requests_when_many_are_in_flight_then_each_of_them_comes_round_more_than_once():
    assert Sizes().num_requests(10) == 20
    assert Sizes().num_requests(2) == 8


def test_figures_when_a_request_failed_then_nothing_is_said_of_the_run():
    with pytest.raises(RuntimeError, match="no room"):
        pd_combined.figures([answer(), answer(error="no room")], 1.0)
    with pytest.raises(RuntimeError, match="no first token"):
        pd_combined.figures([answer(ttft_s=None)], 1.0)


def test_figures_when_all_were_answered_then_tokens_are_counted_over_the_whole_time():
    found = pd_combined.figures([answer(), answer(ttft_s=1.5)], 2.0)
    assert found == {"tokens_per_s": 3.0, "ttft_s": 1.0, "itl_s": 0.2, "itl_p99_s": 0.3}


def test_cells_when_a_round_was_slow_for_both_then_the_ratio_is_of_the_round():
    rows = [row("pair", 0, 10.0), row("combined", 0, 20.0), row("combined", 1, 4.0), row("pair", 1, 2.0)]
    (cell,) = pd_combined.cells(rows)
    assert cell["tokens_per_s_ratio"]["values"] == [0.5, 0.5]
    assert cell["medians"]["combined"]["tokens_per_s"] == 12.0


def test_cells_when_lengths_and_loads_differ_then_each_is_one():
    rows = [row(kind, 0, 1.0, in_flight=load) for load in (2, 10) for kind in ("pair", "combined")]
    assert [(cell["prompt_tokens"], cell["in_flight"]) for cell in pd_combined.cells(rows)] == [(128, 2), (128, 10)]


def test_asking_when_so_many_may_be_under_way_then_never_more(monkeypatch):
    running, most = 0, 0

    class Client:
        def __init__(self, session, url):
            pass

        async def answer(self, messages, token_ids, output_len):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return answer(output_ids=list(token_ids))

    monkeypatch.setattr(pd_combined, "NativeClient", Client)
    answers = asyncio.run(pd_combined.ask_all("http://nobody", [[number] for number in range(9)], 3, 1))
    assert [found.output_ids for found in answers] == [[number] for number in range(9)]
    assert most == 3


def test_measuring_when_rounds_follow_each_other_then_the_first_arrangement_changes(monkeypatch):
    asked = []

    def run(url, rng, prompt_tokens, in_flight, sizes):
        asked.append((url, prompt_tokens))
        return {"tokens_per_s": 1.0, "ttft_s": 1.0, "itl_s": 1.0, "itl_p99_s": 1.0}

    monkeypatch.setattr(pd_combined, "run", run)
    sizes = Sizes(prompt_tokens=(8,), in_flight=(1,), num_rounds=2)
    rows = pd_combined.measure({"pair": "p", "combined": "c"}, sizes, 0)
    assert [url for url, _ in asked[2:]] == ["c", "p", "p", "c"]
    assert [found["kind"] for found in rows] == ["combined", "pair", "pair", "combined"]


def test_page_when_a_run_is_kept_then_each_cell_is_a_row_with_its_spread():
    rows = [row(kind, number, 1.0 + number) for number in range(2) for kind in ("pair", "combined")]
    where = {"commit": "a" * 40, "date": "2026-11-28T00:00:00", "hardware": {"cpu_model": "Some", "num_cores": 2}}
    sizes = {"answer_tokens": QUICK.answer_tokens, "num_rounds": 2}
    run = {"cells": pd_combined.cells(rows), "sizes": sizes, "config": {"quick": True}, "provenance": where}
    page = combined_page(run)
    assert "| 128 | 2 | " + " | ".join(["1.00 (1.00-1.00)"] * len(COMBINED_RATIOS)) in page
    assert "python -m benchmark.pd_combined --quick" in page
