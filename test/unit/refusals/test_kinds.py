# SPDX-License-Identifier: Apache-2.0
"""Windows and states: what of a server cannot share them is one line each, with the flag and the way out."""

from dataclasses import fields, replace

import pytest

from banyan.refusals.kinds import KindFacts, kept_states_refusal, kind_refusals
from banyan.refusals.models import ModelFacts

BAD = {
    "disaggregation_mode": "prefill",
    "is_context_parallel": True,
    "deals_with_nodes": True,
    "keeps_arena": True,
    "asked_store": "mooncake",
    "num_slots": 68,
}
BAD_FOR_STATES = {
    "algorithm": "EAGLE",
    "strategy": "no_buffer",
    "has_int8_checkpoints": True,
    "replays": True,
}
WINDOWS = {"model": ModelFacts(architecture="MellumForCausalLM", has_window=True)}
COMPRESSED = {
    "model": ModelFacts(architecture="DeepseekV4ForCausalLM", has_window=True, has_compressed_kv=True, has_sinks=True),
    "device": "cuda",
}
STATES = {"model": ModelFacts(architecture="Qwen3NextForCausalLM", has_states=True)}


def but(kept, **facts):
    """The same of a model of which this is so too."""
    return {**kept, "model": replace(kept["model"], **facts)}


@pytest.mark.parametrize("kept", [WINDOWS, COMPRESSED, STATES, {}])
def test_kind_when_nothing_stands_against_it_then_it_is_shared(kept):
    assert kind_refusals(KindFacts(**kept)) == []


@pytest.mark.parametrize("facts", [but(WINDOWS, has_sinks=True), *(WINDOWS | {fact: BAD[fact]} for fact in BAD)])
def test_windows_when_something_stands_against_them_then_one_line_names_it_and_the_way_out(facts):
    (line,) = kind_refusals(KindFacts(**facts))
    assert "MellumForCausalLM" in line and "use --disable-hybrid-swa-memory" in line and "\n" not in line
    assert line.endswith("or --banyan-share off")


BAD_FOR_COMPRESSED = {"device": "npu", "prefill_graphs": "breakable"}


@pytest.mark.parametrize("fact", [*BAD, *BAD_FOR_COMPRESSED])
def test_compressed_when_something_stands_against_it_then_one_line_without_a_flag_that_it_has_not(fact):
    (line,) = kind_refusals(KindFacts(**COMPRESSED | {fact: (BAD | BAD_FOR_COMPRESSED)[fact]}))
    assert "DeepseekV4ForCausalLM" in line and line.endswith("use --banyan-share off") and "\n" not in line
    assert "--disable-hybrid-swa-memory" not in line


@pytest.mark.parametrize(
    "facts",
    [but(STATES, has_side_states=True), *(STATES | {fact: bad} for fact, bad in (BAD | BAD_FOR_STATES).items())],
)
def test_states_when_something_stands_against_them_then_one_line_names_it_and_the_way_out(facts):
    (line,) = kind_refusals(KindFacts(**facts))
    assert "Qwen3NextForCausalLM" in line and line.endswith("use --banyan-share off") and "\n" not in line


def test_states_when_the_user_has_them_read_within_a_graph_then_refused_by_name_where_graphs_have_such_pieces():
    captured = {**STATES, "device": "cuda", "captures_states": True, "prefill_graphs": "breakable"}
    (line,) = kind_refusals(KindFacts(**captured))
    assert "SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND" in line and "unset it" in line
    for harmless in ({"device": "cpu"}, {"prefill_graphs": "full"}, {"captures_states": False}):
        assert kind_refusals(KindFacts(**captured | harmless)) == []


def test_facts_when_rules_are_added_then_every_field_is_covered():
    told = {*COMPRESSED, *BAD, *BAD_FOR_STATES, *BAD_FOR_COMPRESSED, "captures_states"}
    assert {field.name for field in fields(KindFacts)} == told


def test_states_when_sglang_keeps_a_second_slot_on_demand_then_the_strategy_that_helps_is_named():
    (line,) = kind_refusals(KindFacts(**STATES, strategy="extra_buffer_lazy"))
    assert "--mamba-radix-cache-strategy extra_buffer_lazy" in line and "use extra_buffer," in line


@pytest.mark.parametrize("kept", [WINDOWS, STATES])
def test_kind_when_several_things_stand_against_it_then_each_has_a_line(kept):
    assert len(kind_refusals(KindFacts(**kept, asked_store="mooncake", keeps_arena=True))) == 2


@pytest.mark.parametrize("facts", [but(WINDOWS, has_sinks=True), {**WINDOWS, "algorithm": "EAGLE3"}])
def test_windows_when_there_is_a_gpu_then_they_are_shared_with_sinks_and_drafts(facts):
    assert kind_refusals(KindFacts(**facts, device="cuda")) == []


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_states_when_there_is_a_gpu_then_they_are_shared_with_drafts(algorithm):
    assert kind_refusals(KindFacts(**STATES, device="cuda", algorithm=algorithm)) == []


def test_kinds_when_a_model_keeps_both_then_each_has_its_line():
    windows, states = kind_refusals(KindFacts(**but(WINDOWS, has_states=True), keeps_arena=True))
    assert "sliding windows" in windows and "keeps states" in states


def test_pages_when_a_model_keeps_nothing_beside_them_then_nothing_is_refused():
    assert kind_refusals(KindFacts(**BAD, **BAD_FOR_STATES)) == []


def test_states_when_sglang_keeps_none_for_such_pages_then_its_reason_is_told():
    line = kept_states_refusal("no_buffer only supports page_size=1.", ("extra_buffer",))
    assert "no_buffer only supports page_size=1." in line and "--mamba-radix-cache-strategy" in line


def test_states_when_the_model_has_no_strategy_that_keeps_them_then_none_is_the_way_out():
    line = kept_states_refusal("no_buffer only supports page_size=1.", ())
    assert "--banyan-share off" in line and "--mamba-radix-cache-strategy" not in line
