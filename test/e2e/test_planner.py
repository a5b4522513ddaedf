# SPDX-License-Identifier: Apache-2.0
"""The planner on the real engine: what requests ask for, what is decided without a wish, what is remembered of it."""

import pytest

from banyan.cli.explain import decisions, sentences
from banyan.planner import Action
from benchmark.engine import Engine

pytestmark = pytest.mark.e2e


@pytest.fixture
def engine(banyan):
    return Engine(banyan.server.url)


def test_plan_when_the_request_asks_then_it_is_computed_or_moved_and_says_so(engine, prompt):
    for action, peer_tokens in ((Action.COMPUTE, 0), (Action.MOVE, 592)):
        ids = prompt(f"asked {action.value}", 600)
        engine.prefill(ids, rank=0)
        meta = engine.prefill(ids, rank=1, action=action)
        assert meta["cached_tokens"] == peer_tokens
        (plan,) = decisions(engine, meta["id"])
        assert (plan["dp_rank"], plan["found"], plan["own_tokens"]) == (1, [["peer", 37]], 0)
        assert plan["moved_pages"] * 16 == peer_tokens
        assert "asked for it" in plan["reason"]
        cheaper = {"cheaper": 592} if action is Action.COMPUTE else {}
        assert plan["computed"] == {**cheaper, "tail": 8}
        told = meta["cached_tokens_details"]
        assert {name: told[f"computed_{name}"] for name in plan["computed"]} == plan["computed"]


def test_prompt_when_part_of_it_was_never_asked_for_then_its_rank_says_how_much(engine, prompt):
    ids = prompt("before", 320)
    engine.prefill(ids, rank=0)
    meta = engine.prefill([*ids, *prompt("behind", 200)], rank=0)
    assert meta["cached_tokens_details"]["computed_new"] == 192
    (plan,) = decisions(engine, meta["id"])
    assert plan["computed"] == {"new": 192, "tail": 8}


def test_counters_when_prompts_were_answered_then_each_token_was_cached_or_computed_for_one_reason(engine, prompt):
    engine.prefill(prompt("counted", 100), rank=0)
    cached = [f"{tier}_tokens" for tier in ("own", "peer", "host", "store")]
    for state in engine.ranks().values():
        computed = [name for name in state if name.startswith("computed_")]
        assert sum(state[name] for name in (*cached, *computed)) == state["prompt_tokens"]


def test_plan_when_forwards_and_moves_were_measured_then_a_long_prefix_is_moved_and_the_figures_are_sane(
    engine, prompt
):
    for number in range(9):
        ids = prompt(f"lesson {number}", 64 + 40 * number)
        engine.prefill(ids, rank=0)
        engine.prefill(ids, rank=1, action=Action.MOVE if number % 2 else Action.COMPUTE)
    ids = prompt("measured", 1200)
    engine.prefill(ids, rank=0)
    meta = engine.prefill(ids, rank=1)
    (plan,) = decisions(engine, meta["id"])
    assert plan["found"] == [["peer", 74]]
    # On a busy machine a copy may look slow enough for the last pages to be computed beside it.
    assert 37 <= plan["moved_pages"] <= 74
    assert meta["cached_tokens_details"]["peer"] == 16 * plan["moved_pages"]
    assert plan["reason"] == "expected to be faster"
    assert plan["outcome"] == "landed"
    assert 0 < plan["expected_us"] < plan["recompute_us"] < 120e6
    about = [line.split()[0] for line in sentences(plan)[1:]]
    assert about == ["found", "dp_origin_kv_len", "plan:", "best", "recompute:", "computed:", "leased"]


def test_clock_when_a_prompt_is_prefilled_then_its_forward_is_timed_with_its_shape(engine, prompt):
    ids = prompt("clock", 500)
    engine.prefill(ids, rank=0)
    # One of six: whoever has the processor in one forward's time makes it longer.
    for number in range(6):
        engine.prefill([*ids[:480], *prompt(f"other end {number}", 100)], rank=0)
    last, *newest = engine.ranks()[0]["forwards"][-7:]
    assert last["pieces"] == [[500, 0]]
    assert [forward["pieces"] for forward in newest] == [[[100, 480]]] * 6
    assert 0 < min(forward["forward_us"] for forward in newest) < last["forward_us"]
