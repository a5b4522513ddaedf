# SPDX-License-Identifier: Apache-2.0
"""Every way of serving that would be silently wrong: one line, naming the flag and the way out."""

from dataclasses import fields

import pytest

from banyan.refusals.modes import ModeFacts, mode_refusals, no_cache_refusal

BAD = {
    "divides_kv": (True, "--enable-dsa-cache-layer-split"),
    "dcp_size": (2, "--dcp-size 2"),
    "enable_pdmux": (True, "--enable-pdmux"),
    "dllm_algorithm": ("LowConfidence", "--dllm-algorithm LowConfidence"),
    "enable_return_routed_experts": (True, "--enable-return-routed-experts"),
    "enable_return_indexer_topk": (True, "--enable-return-indexer-topk"),
    "enable_mis": (True, "--enable-mis"),
    "enable_page_major_kv_layout": (True, "--enable-page-major-kv-layout"),
    "kv_canary": ("raise", "--kv-canary raise"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend mooncake"),
}


def test_modes_when_nothing_is_asked_for_then_there_are_no_refusals():
    assert mode_refusals(ModeFacts()) == []


@pytest.mark.parametrize("field", BAD)
def test_modes_when_one_is_asked_for_then_one_line_names_flag_and_way_out(field):
    value, flag = BAD[field]
    (line,) = mode_refusals(ModeFacts(**{field: value}))
    assert flag in line and "--banyan-share off" in line
    assert "\n" not in line


CONTEXT_PARALLEL = ({"attn_cp_size": 2}, {"enable_prefill_cp": True})


@pytest.mark.parametrize("how", CONTEXT_PARALLEL)
def test_context_parallelism_when_each_shard_has_whole_pages_then_it_is_shared_without_drafts_and_pairs(how):
    assert mode_refusals(ModeFacts(**how)) == []
    (drafts,) = mode_refusals(ModeFacts(**how, algorithm="EAGLE"))
    assert "--speculative-algorithm EAGLE" in drafts and "--banyan-share off" in drafts
    (pairs,) = mode_refusals(ModeFacts(**how, disaggregation_mode="prefill"))
    assert "--disaggregation-mode prefill" in pairs and "--banyan-share off" in pairs
    assert mode_refusals(ModeFacts(algorithm="EAGLE", disaggregation_mode="prefill")) == []


def test_modes_when_deterministic_then_only_flashinfer_is_refused():
    assert mode_refusals(ModeFacts(enable_deterministic_inference=True)) == []
    assert mode_refusals(ModeFacts(enable_deterministic_inference=True, attention_backend="triton")) == []
    assert mode_refusals(ModeFacts(attention_backend="flashinfer")) == []
    (line,) = mode_refusals(ModeFacts(enable_deterministic_inference=True, attention_backend="flashinfer"))
    assert "--enable-deterministic-inference" in line and "triton" in line


def test_modes_when_a_field_is_added_then_it_has_a_refusal_here():
    context_parallel = {"attn_cp_size", "enable_prefill_cp", "algorithm", "disaggregation_mode"}
    told = {*BAD, *context_parallel, "enable_deterministic_inference", "attention_backend"}
    assert {field.name for field in fields(ModeFacts)} == told


def test_no_cache_when_refused_then_what_was_asked_and_what_sglang_says_are_in_it():
    line = no_cache_refusal(asked="--enable-mis", reason="requires radix caching")
    assert line.startswith("--enable-mis: ") and "requires radix caching" in line and "--banyan-share off" in line
