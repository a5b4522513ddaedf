# SPDX-License-Identifier: Apache-2.0
"""What runs found beside what the middle one told, and whether each token has a reason."""

from __future__ import annotations

from benchmark import ceiling_runs

NONE = {"own_tokens": 0, "peer_tokens": 0, "host_tokens": 0, "store_tokens": 0, "prompt_tokens": 0}
TOLD = {"num_arena_frames": 8, "hit_share_half": 0.2, "hit_share_same": 0.4, "hit_share_double": 0.6}


def after(**tokens):
    return {**NONE, **TOLD, "hit_ceiling_24h": 0.9, "computed_new_tokens": 0, "computed_tail_tokens": 0, **tokens}


def test_figures_when_tokens_were_counted_before_the_run_then_they_are_not_the_runs():
    before = after(own_tokens=16, computed_new_tokens=32, prompt_tokens=48)
    of_run = ceiling_runs.figures(
        before, after(own_tokens=48, host_tokens=16, computed_new_tokens=80, prompt_tokens=144)
    )
    assert of_run["tokens"] == {"own_tokens": 32, "host_tokens": 16, "computed_new_tokens": 48}
    assert (of_run["found"], of_run["without_reason"]) == (0.5, 0)


def test_figures_when_tokens_have_neither_been_found_nor_a_reason_then_they_are_told():
    assert ceiling_runs.figures(after(), after(own_tokens=16, prompt_tokens=48))["without_reason"] == 32


def test_runs_when_told_then_each_beside_what_the_middle_one_of_its_trace_said():
    runs = [
        {"trace": trace, "arena": word, "found": 0.5, "told": dict.fromkeys(ceiling_runs.TIMES, share)}
        for trace, share in (("a", 0.5), ("b", 0.75))
        for word in ceiling_runs.TIMES
    ]
    runs[0]["told"] = runs[2]["told"] = {}
    assert [one["off"] for one in ceiling_runs.with_told(runs)] == [0.0, 0.0, 0.0, 0.25, 0.25, 0.25]


def test_arena_when_sized_in_pages_then_it_has_room_for_them():
    gib = float(ceiling_runs.flags(1_024)[-1])
    assert gib * 2**30 // ceiling_runs.page_bytes() == 1_024
