# SPDX-License-Identifier: Apache-2.0
"""SGLang's orders by what is cached pass nobody over for ever."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import queue_order


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: Config())


class Req(SimpleNamespace):
    """As SGLang's, one that can be held weakly."""


def req(num_tokens, matched=0):
    return Req(origin_input_ids=[0] * num_tokens, output_ids=[], num_matched_prefix_tokens=matched)


def longest_prefix_first(policy, queue, *args, **kwargs):
    queue.sort(key=lambda one: -one.num_matched_prefix_tokens)


def num_before(cold, policy):
    """How many warm requests go before it, one in each round, while warm ones keep coming; None for ever."""
    queue, its = [cold], SimpleNamespace(policy=policy)
    for number in range(200):
        queue.append(req(1000, 900))
        queue_order.around_calc_priority(longest_prefix_first, its, queue)
        if queue.pop(0) is cold:
            return number
    return None


@pytest.mark.parametrize("name", sorted(queue_order.BOUNDED))
def test_cold_prompt_when_warm_ones_keep_coming_then_it_waits_for_as_much_as_it_computes(name):
    assert num_before(req(2000), CacheAwarePolicy(name)) == 20


@pytest.mark.parametrize("policy", [CacheAwarePolicy.HRRN, *CacheAgnosticPolicy])
def test_order_when_it_has_a_bound_of_its_own_or_needs_none_then_it_is_sglangs(policy):
    assert num_before(req(2000), policy) is None


def test_order_when_banyan_is_off_then_it_is_sglangs(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    assert num_before(req(2000), CacheAwarePolicy.LPM) is None


def test_names_when_sglang_has_orders_by_what_is_cached_then_all_but_one_are_bounded():
    assert {policy.value for policy in CacheAwarePolicy} - queue_order.BOUNDED == {"hrrn"}
