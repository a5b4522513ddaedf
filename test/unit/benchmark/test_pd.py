# SPDX-License-Identifier: Apache-2.0
"""The figures of the pair benchmark, from rows and times that are known."""

import pytest

from benchmark import pd, pd_times


def row(*, before, linker, is_identical=True):
    compared = {"is_as_alone": is_identical, "is_as_stock_pair": is_identical, "turn": int(before > 0)}
    return {"answer_pages_before": before, "linker_pages": linker, **compared}


MEDIANS = {"banyan": [1.02, 2.1, 0.9], "stock": [1.0, 2.0, 1.0]}


@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "num_pages"),
    # The KV of 16 + 16 tokens is that of 31: one full page of the prompt, none of the answer.
    [(16, 16, 0), (16, 17, 1), (200, 48, 3), (15, 2, 1), (32, 1, 0)],
)
def test_answer_pages_when_the_last_token_is_not_computed_then_only_full_pages_count(num_prompt, num_answer, num_pages):
    assert pd.num_answer_pages(num_prompt, num_answer) == num_pages


def test_found_pages_when_the_decode_server_has_some_itself_then_they_do_not_count():
    assert pd.num_found_pages({"device": 160, "host": 32, "storage": 16, "peer": 0}) == 3
    assert pd.num_found_pages(None) == 0


def test_share_when_one_turn_finds_more_than_its_answer_then_another_is_not_paid_with_it():
    rows = [row(before=0, linker=0), row(before=4, linker=9), row(before=4, linker=2)]
    found = pd.summarise(rows)
    assert found["next_turn_cached_share"] == 0.75 and found["num_answer_pages"] == 8


def test_ratio_when_kinds_take_turns_then_it_is_the_median_of_the_rounds():
    assert pd_times.figures(MEDIANS)["ttft_no_hit_ratio"] == 1.02


def test_misses_when_a_figure_is_bad_then_it_is_named():
    good = {
        "pd_outputs_identical": True,
        "first_turns_as_stock_pair": True,
        "next_turn_cached_share": 0.98,
        "idle_decode_locked_tokens": 0,
        "handover_bytes_ratio": 0.1,
    }
    assert pd.misses(good) == []
    bad = {
        "pd_outputs_identical": False,
        "first_turns_as_stock_pair": False,
        "next_turn_cached_share": None,
        "idle_decode_locked_tokens": 16,
        "decode_pool_whole": False,
        "handover_bytes_ratio": 0.11,
        "killed_decode_right": False,
        "locked_tokens_after_kill": 16,
    }
    assert pd.misses(bad) == list(bad)
