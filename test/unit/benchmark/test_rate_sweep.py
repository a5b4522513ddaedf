# SPDX-License-Identifier: Apache-2.0
"""What a sweep over rates sends, and what it makes of the answers."""

import random

import pytest

from benchmark import rate_sweep
from benchmark.rate_sweep import Load, figures, loads, next_turn, verdicts, within
from benchmark.records import Answer

SENT_PER_S = 3.0
HISTORIES = [tuple(range(100, 180)), tuple(range(300, 340))]


def answered(ttft_s: float | None, error: str = "") -> Answer:
    return Answer(ttft_s=ttft_s, prompt_tokens=100, cached_tokens=80, error=error)


def rate(per_s: float, *ttfts_s: float | None) -> dict:
    # As many as it says would be another number: what is sent is drawn.
    load = Load(per_s, len(ttfts_s) / SENT_PER_S, ((1,),) * len(ttfts_s), (0.0,) * len(ttfts_s))
    return figures(load, [answered(ttft_s, "" if ttft_s else "timeout") for ttft_s in ttfts_s], 1.0)


def test_loads_when_made_twice_then_the_same_and_each_as_frequent_as_it_says():
    made = loads(HISTORIES, [1.0, 8.0], 400.0, seed=3)
    assert made == loads(HISTORIES, [1.0, 8.0], 400.0, seed=3)
    assert [len(load.prompts) / 400.0 for load in made] == [pytest.approx(1.0, rel=0.2), pytest.approx(8.0, rel=0.1)]
    assert all(list(load.at_s) == sorted(load.at_s) and load.at_s[-1] < 400.0 for load in made)


def test_turn_when_a_conversation_goes_on_then_its_history_is_in_front_of_tokens_of_its_own():
    draw = random.Random(1)
    turns = [next_turn(draw, HISTORIES) for _ in range(20)]
    assert {turn[: -rate_sweep.TURN_TOKENS] for turn in turns} == set(HISTORIES)
    assert len({turn[-rate_sweep.TURN_TOKENS :] for turn in turns}) == 20


def test_share_when_requests_fail_then_they_were_not_answered_in_time():
    found = rate(4.0, 0.1, 0.15, 0.4, None)
    assert (found["num_requests"], found["num_errors"], found["cached_share"]) == (4, 1, 0.8)
    assert within(found, 0.1) == {"1": 0.25, "2": 0.5, "5": 0.75}


def medians(verdict: dict) -> dict:
    return {per_s: [share["median"] for share in within.values()] for per_s, within in verdict["within"].items()}


def test_verdicts_when_systems_differ_then_all_are_held_to_the_quickest_idle_hit_and_to_what_was_sent():
    systems = {
        "slow": [{"idle_hit_s": 0.4, "rates": [rate(1.0, 0.4, 0.4), rate(4.0, 0.9, 0.45)]}],
        "quick": [{"idle_hit_s": 0.1, "rates": [rate(1.0, 0.1, 0.1), rate(4.0, 0.2, 0.45)]}],
        "down": [{"idle_hit_s": 0.2, "rates": [rate(1.0, None, None)]}],
    }
    said = verdicts(systems)
    assert said["idle_hit_s"] == 0.1
    assert medians(said["systems"]["quick"]) == {"1": [1.0, 1.0, 1.0], "4": [0.0, 0.5, 1.0]}
    assert {
        name: (verdict["carries_per_s"], verdict["goodput_per_s"]["median"])
        for name, verdict in said["systems"].items()
    } == {"slow": (1.0, SENT_PER_S), "quick": (4.0, SENT_PER_S), "down": (0.0, 0.0)}


def test_verdicts_when_a_rate_was_played_several_times_then_its_median_counts_and_the_spread_is_told():
    runs = [{"idle_hit_s": 0.1, "rates": [rate(1.0, *ttfts_s)]} for ttfts_s in ((0.1, 9), (0.1, 0.1), (9, 9))]
    verdict = verdicts({"some": runs})["systems"]["some"]
    assert verdict["within"]["1"]["5"] == {"median": 0.5, "min": 0.0, "max": 1.0, "values": [0.5, 1.0, 0.0]}
    assert verdict["goodput_per_s"]["values"] == [1.5, 3.0, 0.0] and verdict["carries_per_s"] == 0.0


def test_figures_when_answers_say_where_their_tokens_were_then_they_are_added_up():
    load = Load(1.0, 2.0, ((1,), (2,)), (0.0, 1.0))
    answers = [answered(0.1, "") for _ in range(2)]
    for answer, (device, peer) in zip(answers, [(3, 0), (1, 4)], strict=True):
        answer.cached_tokens_details = {"device": device, "peer": peer}
    # Of each 80 tokens were cached.
    found = {"device": 4, "peer": 4, "host": 0, "storage": 0, "untold": 152}
    assert figures(load, answers, 1.0)["cached_by_source"] == found
