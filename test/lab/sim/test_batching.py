# SPDX-License-Identifier: Apache-2.0
from array import array
from collections import deque
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from banyan.planner import PrefillCost
from banyan_lab.sim.batching import attention_cost, by_quota, by_tokens, largest_extend
from banyan_lab.sim.compute import PrefillModel
from banyan_lab.sim.llms import llm
from banyan_lab.sim.turn import Agent, Turn
from banyan_lab.sim.workload import Trajectory

COST = PrefillCost(fixed_us=9000.0, token_us=400.0, pair_us=0.2, context_us=1.5, masked_us=0.1)


def rank(*new_tokens, cached_tokens=0):
    turns = []
    for number, new in enumerate(new_tokens):
        agent = Agent(Trajectory(array("i", [new]), array("i", [1])), number)
        agent.context_tokens = cached_tokens
        turns.append(Turn(agent, number, 0.0))
    return SimpleNamespace(ready=deque(turns))


def shapes(batch):
    return [(extend, prefix) for _, extend, prefix in batch]


def test_by_tokens_when_full_then_the_last_request_is_cut_and_stays():
    here = rank(600, 600, 600, cached_tokens=50)
    assert shapes(by_tokens(1000)(here)) == [(600, 50), (400, 50)]
    here.ready[0].left_tokens -= 400
    assert shapes(by_tokens(1000)(here)) == [(200, 450), (600, 50)]
    assert not here.ready


def test_by_quota_when_attention_is_used_up_then_cut_there_and_within_the_quota():
    cost = PrefillCost(fixed_us=0.0, token_us=1.0, pair_us=0.0, context_us=0.0)
    here = rank(600, 600)
    assert shapes(by_quota(cost, 700.0, 10_000)(here)) == [(600, 0), (100, 0)]


def test_by_quota_when_not_even_a_token_fits_then_one_goes_all_the_same():
    cost = PrefillCost(fixed_us=0.0, token_us=0.0, pair_us=1.0, context_us=0.0)
    assert shapes(by_quota(cost, 10.0, 10_000)(rank(5, cached_tokens=1_000))) == [(1, 1_000)]


def test_attention_cost_when_the_context_is_long_then_the_planner_predicts_what_the_model_takes():
    for name in ("deepseek-v3-2", "deepseek-v3", "llama3-8b"):
        prefill = PrefillModel(llm(name), 350e12)
        cost = attention_cost(prefill)
        for new, cached in ((400, 30_000), (2_000, 8_000)):
            taken_us = prefill.attention_s(new_tokens=new, cached_tokens=cached) * 1e6
            assert abs(cost.piece_us(new, cached) / taken_us - 1) < 1e-3


@given(st.integers(0, 100_000), st.floats(0, 1e7), st.integers(0, 8192))
def test_largest_extend_when_asked_then_it_fits_and_one_more_does_not(prefix, budget_us, at_most):
    extend = largest_extend(COST, prefix, budget_us, at_most=at_most)
    assert 0 <= extend <= at_most
    assert COST.piece_us(extend, prefix) <= budget_us
    assert extend == at_most or COST.piece_us(extend + 1, prefix) > budget_us
