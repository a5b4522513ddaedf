# SPDX-License-Identifier: Apache-2.0
"""What is said of a model before it is loaded is what its pools then are."""

import json

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from test.sglang_plugin.features.windows.compressed_gpu import PLAIN, RATIOS, make_node
from test.sglang_plugin.rank.index_keys_pool import SharedDSAPool

from banyan.config import DEFAULT_PAGE_TOKENS
from banyan.refusals.models import model_refusal
from banyan.sglang_plugin.launcher.model import (
    INDEXED_PAGE_TOKENS,
    describe,
    model_facts,
    page_of_model,
    page_tokens_of,
)
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool, SharedMLAPool
from benchmark.modes import models, pictures

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
MLA = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
DSA = {
    **MLA,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v3",
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
}
COMMON = {"layer_num": 3, "device": "cpu", "enable_memory_saver": False, "dtype": torch.bfloat16}
LATENTS = {**COMMON, "kv_lora_rank": 32, "qk_rope_head_dim": 16}


def heads():
    sizes = {"size": 64, "page_size": DEFAULT_PAGE_TOKENS, "head_num": 2, "head_dim": 16}
    return SharedMHAPool(**COMMON, **sizes, enable_alt_stream=False)


def latents():
    return SharedMLAPool(**LATENTS, size=64, page_size=DEFAULT_PAGE_TOKENS)


def index_keys():
    index = {"kv_cache_dim": 48, "index_head_dim": 128, "index_buf_size": 128}
    return SharedDSAPool(**LATENTS, **index, size=128, page_size=INDEXED_PAGE_TOKENS)


COMPRESSED = {
    **LLAMA,
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": len(RATIOS),
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [*RATIOS, 4],
}


def test_page_when_kv_is_compressed_then_it_is_that_of_the_pool(tmp_path, monkeypatch):
    """Of the layers that compress; what the layer for the next tokens keeps is a draft's."""
    (tmp_path / "config.json").write_text(json.dumps(COMPRESSED))
    (rank,) = make_node(monkeypatch, PLAIN, num_ranks=1)
    model = ModelConfig(str(tmp_path))
    assert page_tokens_of(model) == rank.pool.page_size
    assert page_of_model(model, page_tokens_of(model)) == rank.linker.kinds.full._page


@pytest.mark.parametrize("config, pool", [(LLAMA, heads), (MLA, latents), (DSA, index_keys)])
def test_page_when_it_is_told_from_the_configuration_then_it_is_that_of_the_pool(tmp_path, config, pool):
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = pool()
    model = ModelConfig(str(tmp_path))
    page = page_of_model(model, page_tokens_of(model))
    assert (page_tokens_of(model), page) == (made.page_size, made.banyan_geometry.page)
    said = describe(str(tmp_path))
    assert said["refused"] is None and said["bytes_by_part"] == page.bytes_by_name and not said["takes_media"]


def test_model_when_its_index_keys_are_pooled_then_it_is_refused_with_no_weight(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**DSA, "index_kpool": 4}))
    said = describe(str(tmp_path))
    assert "index keys of several tokens" in said["refused"] and "bytes_by_part" not in said


def test_page_when_a_draft_runs_beside_the_model_then_its_layers_are_weighed_too(tmp_path):
    for name, config in (("model", DSA), ("draft", {**LLAMA, "num_hidden_layers": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    alone, said = describe(str(tmp_path / "model")), describe(str(tmp_path / "model"), str(tmp_path / "draft"))
    row_bytes = INDEXED_PAGE_TOKENS * 2 * 16 * 2
    assert said["bytes_by_part"] == {**alone["bytes_by_part"], "draft keys": row_bytes, "draft values": row_bytes}
    assert (alone["num_layers"], said["num_layers"]) == (3, 4)


def test_draft_when_it_keeps_something_else_then_the_pair_is_refused(tmp_path):
    for name, config in (("model", LLAMA), ("draft", {**DSA, "index_kpool": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert "index keys of several tokens" in describe(str(tmp_path / "model"), str(tmp_path / "draft"))["refused"]


def test_model_when_it_has_a_vision_tower_then_it_takes_media(tmp_path):
    assert describe(str(pictures.ensure(tmp_path)))["takes_media"]


def test_model_when_it_keeps_states_then_a_page_and_a_state_are_weighed(tmp_path):
    said = describe(str(models.ensure(models.STATE)))
    # Two layers attend to all tokens, and two have four matrices of 32 x 32 in float32 and the inputs of three taps.
    assert said["refused"] is None and said["num_layers"] == said["num_state_layers"] == 2
    assert said["bytes_by_part"] == {"keys": 4096, "values": 4096}
    assert said["state_bytes_by_part"] == {
        "recurrent states": 2 * 4 * 32 * 32 * 4,
        "convolution inputs": 2 * (2 + 2 + 4) * 32 * 3 * 2,
    }
    drafted = describe(str(models.ensure(models.STATE)), str(models.ensure(models.LLAMA)))
    assert "verifies drafts over states with GPU kernels only" in drafted["refused"]


TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config, may_attend",
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, True),
        ({"architectures": ["CLIPModel"], "model_type": "clip"}, True),
        ({"architectures": ["RobertaModel"], "model_type": "roberta"}, True),
        ({"architectures": ["DistilBertModel"], "model_type": "distilbert"}, True),
        ({"architectures": ["RobertaForCausalLM"], "model_type": "roberta", "is_decoder": True}, False),
        ({"architectures": ["MistralModel"], "model_type": "mistral"}, False),
        (LLAMA, False),
    ],
)
def test_model_when_its_tokens_may_see_what_follows_then_it_makes_no_vectors_here(tmp_path, config, may_attend):
    """SGLang takes from Transformers what it does not have, and keeps a radix cache of the KV of encoders."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | config))
    line = model_refusal(model_facts(ModelConfig(str(tmp_path), is_embedding=True), steps_together_on_cpu=False))
    assert line is None if not may_attend else config["architectures"][0] in line and "follows" in line


def test_model_when_it_has_an_encoder_beside_its_decoder_then_it_is_refused(tmp_path):
    text = {**LLAMA, "model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0}
    mllama = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**mllama, "torch_dtype": "bfloat16"}))
    assert "Mllama" in describe(str(tmp_path))["refused"]
