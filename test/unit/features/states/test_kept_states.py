# SPDX-License-Identifier: Apache-2.0
"""States: what of a server cannot share them is one line each, with the flag and the way out."""

import pytest

from banyan.features.states.kept_states import StateFacts, state_refusals
from banyan.refusals.models import kept_states_refusal

BAD = {
    "device": "cuda",
    "strategy": "no_buffer",
    "has_int8_checkpoints": True,
    "replays": True,
    "has_side_states": True,
    "algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "steps_together": True,
    "deals_with_nodes": True,
    "keeps_arena": True,
    "asked_store": "mooncake",
    "num_slots": 68,
}


def test_states_when_nothing_stands_against_them_then_they_are_shared():
    assert state_refusals(StateFacts(architecture="Qwen3NextForCausalLM")) == []


@pytest.mark.parametrize("fact", BAD)
def test_states_when_something_stands_against_them_then_one_line_names_it_and_the_way_out(fact):
    (line,) = state_refusals(StateFacts(architecture="Qwen3NextForCausalLM", **{fact: BAD[fact]}))
    assert "Qwen3NextForCausalLM" in line and line.endswith("use --banyan-share off") and "\n" not in line


def test_states_when_sglang_keeps_a_second_slot_on_demand_then_the_strategy_that_helps_is_named():
    (line,) = state_refusals(StateFacts(strategy="extra_buffer_lazy"))
    assert "--mamba-radix-cache-strategy extra_buffer_lazy" in line and "use extra_buffer," in line


def test_states_when_several_things_stand_against_them_then_each_has_a_line():
    assert len(state_refusals(StateFacts(algorithm="NGRAM", keeps_arena=True))) == 2


def test_states_when_sglang_keeps_none_for_such_pages_then_its_reason_is_told():
    line = kept_states_refusal("no_buffer only supports page_size=1.")
    assert "no_buffer only supports page_size=1." in line and "--mamba-radix-cache-strategy" in line
