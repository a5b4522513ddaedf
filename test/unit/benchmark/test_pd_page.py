# SPDX-License-Identifier: Apache-2.0
"""The page of the pair benchmark says what the kept run found, and under which conditions."""

from benchmark import pd_page

RUN = {
    "pd_outputs_identical": True,
    "next_turn_cached_share": 0.98,
    "ttft_no_hit_ratio": 1.01,
    "ttft_no_hit_ratios": [0.99, 1.01, 1.2],
    "idle_decode_locked_tokens": 0,
    "handover_bytes_ratio": 0.05,
    "num_turns_compared": 12,
    "num_turns_identical": 12,
    "num_turns_as_stock_pair": 11,
    "num_answer_pages": 27,
    "sizes": {
        "num_conversations": 3,
        "num_turns": 4,
        "first_tokens": 200,
        "question_tokens": 40,
        "answer_tokens": 48,
    },
    "config": {"quick": False, "conversations": 3, "seed": 0, "out": "pd"},
    "provenance": {"commit": "0123456789abcdef", "date": "2026-11-23T08:00:00+00:00"}
    | {"hardware": {"cpu_model": "A processor", "num_cores": 2}},
}
RUN["times"] = {"sizes": {"prompt_tokens": 400}, "provenance": RUN["provenance"]}


def test_page_when_a_figure_was_not_taken_then_its_row_is_missing_and_the_others_stand_beside_their_aims():
    page = pd_page.page(RUN)
    assert "| `pd_outputs_identical` | true | true |" in page and "| `handover_bytes_ratio` | 0.05 | <= 0.10 |" in page
    assert "killed_decode_right" not in page
    words = " ".join(page.split())
    assert (
        "`python -m benchmark.pd --conversations 3`, commit 0123456789, 2026-11-23, A processor with 2 cores." in words
    )
    assert (
        "Of 12 answers 12 are those of a server alone, and 11 those of the pair with sharing off." in words
        and "by round: 0.99, 1.01, 1.20." in words
    )
    assert max(map(len, page.splitlines())) <= 120


def test_page_when_times_are_of_another_run_then_it_says_which():
    times = {"sizes": {"prompt_tokens": 400}, "provenance": {**RUN["provenance"], "commit": "fedcba9876543210"}}
    words = " ".join(pd_page.page({**RUN, "times": times}).split())
    assert "(`python -m benchmark.pd --times`, commit fedcba9876, 2026-11-23, A processor with 2 cores) of" in words
    assert "--times" not in pd_page.page(RUN)


DUAL = {
    "dual_ttft_ratio": {"median": 0.5, "min": 0.41, "max": 0.6},
    "unlimited_ratio": {"median": 1.02, "min": 1.0, "max": 1.04},
    "dual_outputs_identical": True,
    "dual_settings": {
        "dual": {
            "provenance": RUN["provenance"],
            "sizes": {"num_prompts": 12, "prompt_tokens": 1600, "num_rounds": 4, "limit_mb_per_s": 4.0},
            "counters": {"prefill": {"remote_prefetches_failed": 1}, "decode": {"remote_prefetches": 20}},
        }
    },
}


def test_dual_page_when_a_run_is_kept_then_ratios_have_their_spread_and_failures_are_told():
    page = pd_page.dual_page(DUAL)
    assert "| `dual_ttft_ratio` | 0.50 (0.41-0.60) | <= 0.5 |" in page
    assert "| `dual_outputs_identical` | true | true |" in page
    assert "split_ratio" not in page
    assert "read for 20 requests; 1 such reads failed" in " ".join(page.split())


def test_dual_page_when_settings_are_of_several_runs_then_each_is_named():
    one = DUAL["dual_settings"]["dual"]
    later = {**one, "provenance": {**RUN["provenance"], "commit": "fedcba9876543210"}}
    run = {**DUAL, "dual_settings": {"dual": one, "split": later, "unlimited": one}}
    words = " ".join(pd_page.dual_page(run).split())
    assert "`python -m benchmark.pd --dual dual unlimited`, commit 0123456789, 2026-11-23, A processor" in words
    assert "2 cores; `python -m benchmark.pd --dual split`, commit fedcba9876, 2026-11-23" in words
    assert "read for 60 requests; 3 such" in words


def test_dual_page_when_agents_were_measured_too_then_their_ratios_and_sizes_are_told():
    hurried = [("on", 3.0), ("off", 9.0), ("on", 5.0)]
    rows = [{"load": "hurried", "kind": kind, "jct_s": jct_s} for kind, jct_s in hurried]
    sizes = {
        "num_agents": 32,
        "num_turns": 6,
        "first_tokens": 400,
        "added_tokens": 120,
        "answer_tokens": 16,
        "num_rounds": 2,
        "turns_per_s": 2.0,
    }
    agents = {"rows": rows, "sizes": sizes, "provenance": RUN["provenance"]}
    ratio = {"median": 0.4, "min": 0.3, "max": 0.5}
    for run in ({**DUAL, "agents": agents, "agents_jct_ratio": ratio}, {"agents": agents, "agents_jct_ratio": ratio}):
        page = " ".join(pd_page.dual_page(run).split())
        assert "| `agents_jct_ratio` | 0.40 (0.30-0.50) | <= 0.7 |" in page
        assert (
            "32 at once with 6 turns" in page
            and "A hurried one took 4.0 s with the dual path and 9.0 s without" in page
        )
        assert "Paced" not in page
    paced = [("on", 0.012, 0.1), ("off", 0.01, 0.2)]
    rows += [{"load": "paced", "kind": kind, "tpot_s": tpot_s, "latest_s": late_s} for kind, tpot_s, late_s in paced]
    page = " ".join(pd_page.dual_page({**DUAL, "agents": agents, "agents_jct_ratio": ratio}).split())
    assert "2.0 turns a second, of which none began later than 200 ms after its time" in page
    assert "came 12.0 ms apart with the dual path and 10.0 ms without" in page


def test_slow_page_when_a_run_is_kept_then_its_figures_stand_with_what_was_sent_over_what():
    found = {"fast_ttft_s": [3.0, 3.1, 9.0], "slow_ttft_s": [3.2], "transfer_s": 1.5}
    run = {
        "exposed_transfer_share": 0.06,
        "exposed_transfer_share_stock": 0.9,
        "handover_wire_ratio": 0.03,
        "slow": {
            "kinds": {"on": found},
            "sizes": {"link_mbit": 200, "prompt_tokens": 1600, "num_prompts": 3},
            "provenance": RUN["provenance"],
        },
    }
    page = pd_page.slow_page(run)
    assert "| `exposed_transfer_share` | 0.06 | <= 0.15 |" in page
    assert "took 3.10 s with the fast one, 3.20 s with the slow one, where sending took 1.50 s" in " ".join(
        page.split()
    )


def test_classes_page_when_a_run_is_kept_then_its_figures_stand_beside_their_aims():
    run = {
        "high_class_p99_ratio": 1.2,
        "high_class_p99_ratio_bounded": 4.0,
        "high_class_p99_ratio_unmarked": 9.0,
        "pulls_path_share": 0.91,
        "pulls_path_share_bounded": 0.92,
        "classes": {
            "sizes": {"link_mbit": 1000, "num_rounds": 3, "round_s": 6.0, "in_flight_kb": 112},
            "provenance": RUN["provenance"],
        },
    }
    page = pd_page.classes_page(run)
    assert "| `high_class_p99_ratio` | 1.2 | <= 1.3 |" in page and "1000 Mbit/s" in page
    assert "to 112 KiB under way" in " ".join(page.split())
