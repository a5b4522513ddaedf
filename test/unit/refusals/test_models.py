# SPDX-License-Identifier: Apache-2.0
"""Models that cache more than full attention's KV: one line, with the way out where there is one."""

from dataclasses import fields

import pytest

from banyan.refusals.models import (
    ENCODERS,
    SPLIT_DRAFTS,
    ModelFacts,
    draft_vocabulary_refusal,
    index_refusal,
    model_refusal,
)

CACHES = [field.name for field in fields(ModelFacts) if field.name.startswith("has_")]
SERVED = ("has_window", "has_sinks", "has_states", "has_side_states", "has_index_keys", "has_compressed_kv")
CACHES = [name for name in CACHES if name not in SERVED]


def test_model_when_it_has_full_attention_alone_then_it_is_not_refused():
    assert model_refusal(ModelFacts(architecture="LlamaForCausalLM")) is None


@pytest.mark.parametrize("cache", CACHES)
def test_model_when_it_caches_more_then_one_line_names_it_and_the_way_out(cache):
    line = model_refusal(ModelFacts(architecture="SomeModel", **{cache: True}))
    assert "SomeModel" in line and "--banyan-share off" in line and "\n" not in line
    assert "--disable-hybrid-swa-memory" not in line


def test_model_when_windows_are_all_that_it_has_beside_full_attention_then_it_is_not_refused_here():
    assert model_refusal(ModelFacts(architecture="SomeModel", has_window=True, has_sinks=True)) is None


def test_model_when_states_are_all_that_it_has_beside_full_attention_then_it_is_not_refused_here():
    assert model_refusal(ModelFacts(architecture="SomeModel", has_states=True, has_side_states=True)) is None


@pytest.mark.parametrize("ratios, is_known", [({0, 4, 128}, True), ({4}, True), ({0, 1, 2}, False), ({4, 64}, False)])
def test_model_when_its_kv_is_compressed_then_it_depends_on_the_rates(ratios, is_known):
    """DeepSeek-V4's are known, V4.1's are not: several of its layers share rows."""
    line = model_refusal(
        ModelFacts(architecture="SomeModel", has_window=True, has_compressed_kv=True, compression_ratios=ratios)
    )
    assert line is None if is_known else "other rates" in line and "--banyan-share off" in line


def test_model_when_its_vocabulary_is_split_then_it_is_refused_for_ranks_in_step_on_the_cpu_alone():
    llama = "LlamaForCausalLM"
    line = model_refusal(ModelFacts(architecture=llama, steps_together_on_cpu=True))
    assert llama in line and "--attn-dp-size" in line and "use --dp N alone" in line and "\n" not in line
    assert model_refusal(ModelFacts(architecture=llama)) is None
    assert model_refusal(ModelFacts(architecture="Qwen3MoeForCausalLM", steps_together_on_cpu=True)) is None


@pytest.mark.parametrize("architecture", sorted(SPLIT_DRAFTS))
def test_draft_when_its_vocabulary_is_split_then_one_line_names_it_and_the_way_out(architecture):
    line = draft_vocabulary_refusal(architecture)
    assert architecture in line and "use --dp N alone" in line and "EAGLE3" in line and "\n" not in line
    assert draft_vocabulary_refusal("DeepseekV3ForCausalLMNextN") is None


def test_model_when_it_has_windows_and_states_then_no_flag_is_promised_to_help():
    line = model_refusal(ModelFacts(has_window=True, has_states=True))
    assert "windo" in line and "states" in line and "--disable-hybrid-swa-memory" not in line


@pytest.mark.parametrize("bad", [{"tokens_per_key": 4}, {"num_without": 3}, {"is_divided": True}])
def test_index_when_its_keys_are_not_beside_the_kv_then_one_line_says_how_they_lie(bad):
    plain = {"tokens_per_key": 1, "num_without": 0, "is_divided": False}
    assert index_refusal(**plain) is None
    line = index_refusal(**{**plain, **bad})
    assert "index keys" in line and "--banyan-share off" in line and "\n" not in line


@pytest.mark.parametrize("architecture", sorted(ENCODERS))
def test_model_when_its_tokens_see_what_follows_then_no_beginning_of_a_prompt_is_shared(architecture):
    line = model_refusal(ModelFacts(architecture=architecture))
    assert architecture in line and "--banyan-share off" in line and "\n" not in line
    told = model_refusal(ModelFacts(architecture="Other", attends_to_what_follows=True))
    assert told == line.replace(architecture, "Other")


def test_model_when_an_images_tokens_come_whole_or_not_at_all_then_it_is_refused_with_pages_of_several_tokens():
    """The second question about an image ended the server."""
    line = model_refusal(ModelFacts(architecture="MllamaForConditionalGeneration", is_encoder_decoder=True))
    assert "Mllama" in line and "--banyan-share off with --page-size 1" in line and "\n" not in line
