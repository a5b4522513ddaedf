# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin alike: what is asked, and what is said of the answers. No server runs."""

from types import SimpleNamespace

import pytest

from benchmark.bursts import Burst, Played, figures, row


def answer(ttft_s, cached_tokens, output_ids=(1,), error=""):
    return SimpleNamespace(
        ttft_s=ttft_s, cached_tokens=cached_tokens, prompt_tokens=100, output_ids=list(output_ids), error=error
    )


def test_prompts_when_a_burst_is_drawn_then_all_begin_alike_and_no_other_burst_does():
    burst = Burst(num_prompts=3, head_tokens=32, own_tokens=16)
    prompts, others = burst.prompts(2, "one"), burst.prompts(2, "other")
    assert len(prompts) == 6 and {len(prompt) for prompt in prompts} == {48}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1 and len({tuple(prompt[32:]) for prompt in prompts}) == 6
    assert prompts[0][0] != others[0][0]


def test_figures_when_answers_differ_or_fail_then_both_are_counted():
    off = Played(4.0, [answer(1.0, 0), answer(2.0, 0)])
    seen = figures(Played(3.0, [answer(0.5, 0), answer(1.0, 80, output_ids=(2,), error="500")]), off)
    assert seen == {
        "answered_s": 3.0,
        "mean_ttft_s": 0.75,
        "cached_share": 0.4,
        "others_cached_share": None,
        "num_same_answers": 1,
        "num_errors": 1,
    }


def test_figures_when_other_prompts_were_asked_again_then_what_was_found_and_failed_of_them_counts():
    off = Played(1.0, [answer(1.0, 0)])
    seen = figures(Played(1.0, [answer(1.0, 0)], others=[answer(1.0, 90), answer(1.0, 0, error="500")]), off)
    assert seen["others_cached_share"] == 0.45 and seen["num_errors"] == 1


@pytest.mark.parametrize(("others_cached_share", "best"), [(None, 0.7086), (0.5, 0.9448)])
def test_row_when_rounds_were_played_then_ratios_are_of_each_round_and_the_best_share_is_told(
    others_cached_share, best
):
    def run(answered_s):
        return {
            "answered_s": answered_s,
            "mean_ttft_s": answered_s / 2,
            "cached_share": 0.5,
            "others_cached_share": others_cached_share,
        }

    of_burst = row(1, Burst(4, 1_000, 50), {"off": [run(2.0), run(4.0)], "on": [run(1.0), run(1.0)]})
    assert of_burst["best_cached_share"] == best
    assert of_burst["arms"]["on"]["answered_to_off"]["values"] == [0.5, 0.25]
    assert of_burst["arms"]["off"]["answered_s"] == 3.0
    assert of_burst["arms"]["on"]["others_cached_share"] == others_cached_share
