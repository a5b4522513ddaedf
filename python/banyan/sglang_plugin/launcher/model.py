# SPDX-License-Identifier: Apache-2.0
"""What a model keeps for its tokens, from its configuration: nothing is loaded.

A server asks when it has resolved its flags. ``banyan doctor MODEL`` asks ahead of any server, in a process of its own:
``python -m banyan.sglang_plugin.launcher.model MODEL [DRAFT]`` prints one JSON object.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    ModelImpl,
    get_dsa_index_head_dim,
    get_dsa_index_kpool,
    is_deepseek_dsa,
    is_deepseek_v4,
    is_hybrid_swa_model,
    is_minimax_sparse,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_cpu

from banyan.config import DEFAULT_PAGE_TOKENS
from banyan.layout import PageLayout
from banyan.layout.page import COMPRESSED_LATENTS, INDEX_KEYS, Part
from banyan.refusals.kinds import KindFacts, kind_refusals
from banyan.refusals.models import ModelFacts, model_refusal

INDEXED_PAGE_TOKENS = 64
"""What SGLang makes of every page size where an indexer has keys."""

COMPRESSED_PAGE_TOKENS = 256
"""And where KV is compressed."""

INDEXED_RATIO = 4
"""Of compression, at which an indexer has a key for each row."""


def model_facts(model_config: Any, *, steps_together_on_cpu: bool) -> ModelFacts:
    """What SGLang will build pools for, as far as the configuration tells."""
    hf_config, stateful = model_config.hf_config, mambaish_config(model_config)
    return ModelFacts(
        architecture=architecture_of(model_config),
        steps_together_on_cpu=steps_together_on_cpu,
        has_window=model_config.is_hybrid_swa,
        has_sinks=model_config.has_attention_sinks,
        has_states=stateful is not None,
        has_side_states=bool(getattr(stateful, "short_conv_layer_ids", None)),
        has_index_keys=is_deepseek_dsa(hf_config),
        has_pooled_index_keys=is_deepseek_dsa(hf_config) and get_dsa_index_kpool(hf_config) > 1,
        has_compressed_kv=is_deepseek_v4(hf_config),
        compression_ratios=frozenset(model_config.compress_ratios if is_deepseek_v4(hf_config) else ()),
        has_sparse_kv=is_minimax_sparse(hf_config),
        num_kv_heads=model_config.get_total_num_kv_heads(),
        takes_media=bool(model_config.is_multimodal),
        is_encoder_decoder=model_config.is_encoder_decoder,
        attends_to_what_follows=_attends_to_what_follows(model_config),
    )


def _attends_to_what_follows(model_config: Any) -> bool:
    """Whether a prefix has other KV before another end, as SGLang says of its own models. Of those that it takes from
    Transformers it knows when they are built: what makes vectors and does not call itself a decoder may be an encoder.
    """
    spec = model_config.embedding_model_spec
    if spec.bidirectional_attention:
        # Without a radix cache nothing is shared anyhow, which is another line.
        return not spec.safe_disable_radix_cache
    if model_config.is_generation or getattr(model_config.hf_text_config, "is_decoder", False):
        return False
    # Imported here: all models come with it, which takes seconds.
    from sglang.srt.models.registry import ModelRegistry

    is_own = any(map(ModelRegistry.is_arch_supported, model_config.hf_config.architectures or ()))
    return not is_own or model_config.model_impl == ModelImpl.TRANSFORMERS


def has_windows(model_config: Any) -> bool:
    """Whether attention looks back through windows, be their KV kept in full (``--disable-hybrid-swa-memory``, models
    for which SGLang has one pool only)."""
    kinds = getattr(model_config.hf_text_config, "layer_types", None) or ()
    architectures = model_config.hf_config.architectures or []
    return "sliding_attention" in kinds or is_hybrid_swa_model(architectures, model_config.hf_text_config)


def architecture_of(model_config: ModelConfig) -> str:
    return (model_config.hf_config.architectures or ["?"])[0]


def page_tokens_of(model_config: Any) -> int:
    """Tokens of a page, where the flags leave it open."""
    if is_deepseek_v4(model_config.hf_config):
        return COMPRESSED_PAGE_TOKENS
    is_mla = model_config.attention_arch is AttentionArch.MLA
    is_indexed = is_mla and is_deepseek_dsa(model_config.hf_config)
    return INDEXED_PAGE_TOKENS if is_indexed else DEFAULT_PAGE_TOKENS


def page_of_model(model_config: Any, page_tokens: int) -> PageLayout:
    """What belongs to a page of so many tokens, where one shard has all heads and KV has the model's own type."""
    element_bytes, hf_config = model_config.dtype.itemsize, model_config.hf_config
    if is_deepseek_v4(hf_config):
        return _page_of_compressed(model_config, page_tokens)
    # Of a checkpoint that has both, the draft is the layers behind the model's.
    stateful = mambaish_config(model_config)
    num_layers = model_config.num_attention_layers if stateful is None else len(stateful.full_attention_layer_ids)
    if model_config.is_draft_model:
        num_layers = model_config.num_nextn_predict_layers or num_layers
    if model_config.attention_arch is AttentionArch.MLA:
        index_dim = get_dsa_index_head_dim(hf_config) if is_deepseek_dsa(hf_config) else 0
        return PageLayout.of_latents(
            num_layers=num_layers,
            page_tokens=page_tokens,
            row_bytes=(model_config.kv_lora_rank + model_config.qk_rope_head_dim) * element_bytes,
            index_dim=index_dim,
        )
    return PageLayout.of_heads(
        num_layers=num_layers,
        page_tokens=page_tokens,
        num_heads=model_config.get_num_kv_heads(1),
        head_dim=model_config.head_dim,
        value_dim=model_config.v_head_dim,
        element_bytes=element_bytes,
    )


def _page_of_compressed(model_config: Any, page_tokens: int) -> PageLayout:
    """Of a model whose KV is compressed, in SGLang's first layout; as of other models without its windows."""
    # Imported here: what SGLang has beside it takes a second.
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import KVLayout, get_dsv4_indexer_bytes_per_token

    layers = []
    for ratio in filter(None, model_config.compress_ratios[: model_config.num_hidden_layers]):
        num_rows = page_tokens // ratio
        parts = [Part(f"{COMPRESSED_LATENTS} {ratio}", KVLayout.V4.page_bytes(num_rows))]
        if ratio == INDEXED_RATIO:
            key_bytes = get_dsv4_indexer_bytes_per_token(model_config.index_head_dim, use_fp4_indexer=False)
            parts.append(Part(INDEX_KEYS, num_rows * key_bytes))
        layers.append(tuple(parts))
    return PageLayout(tuple(layers))


def state_of_model(model_config: Any) -> PageLayout | None:
    """What belongs to a state, where one shard has all heads; None for a model without."""
    stateful = mambaish_config(model_config)
    if stateful is None:
        return None
    with get_parallel().override(attn_tp_size=1, enable_cp_tp_group_sharing=False):
        kept = stateful.mamba2_cache_params
    return PageLayout.of_states(
        num_layers=len(kept.layers),
        recurrent_bytes=math.prod(kept.shape.temporal) * kept.dtype.temporal.itemsize,
        convolution_bytes=[math.prod(shape) * kept.dtype.conv.itemsize for shape in kept.shape.conv],
    )


def describe(model_path: str, draft_path: str | None = None) -> dict[str, Any]:
    """What ``banyan doctor`` says of a model, and of its draft: a refusal, or what a page of both weighs."""
    model_config = ModelConfig(model_path)
    # A model by itself: on a GPU, or with ranks that do not step together.
    facts = model_facts(model_config, steps_together_on_cpu=False)
    drafts = [] if draft_path is None else [ModelConfig(draft_path, is_draft_model=True)]
    lines = [model_refusal(facts), *(model_refusal(model_facts(one, steps_together_on_cpu=False)) for one in drafts)]
    # On this machine, with nothing else asked for.
    device, algorithm = "cpu" if is_cpu() else "cuda", "of a draft model" if drafts else None
    lines += kind_refusals(KindFacts(model=facts, device=device, algorithm=algorithm))
    line = next((line for line in lines if line is not None), None)
    said: dict[str, Any] = {"architecture": facts.architecture, "refused": line}
    if line is None:
        page_tokens = page_tokens_of(model_config)
        page = page_of_model(model_config, page_tokens)
        # Such a draft has windows only, which are not counted.
        paged = [draft for draft in drafts if not is_deepseek_v4(draft.hf_config)]
        page = page.followed_by(page_of_model(draft, page_tokens) for draft in paged)
        said |= {
            "page_tokens": page_tokens,
            "num_layers": len(page.layers),
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "bytes_by_part": page.bytes_by_name,
            "takes_media": bool(model_config.is_multimodal),
        }
        state = state_of_model(model_config)
        if state is not None:
            said |= {"state_bytes_by_part": state.bytes_by_name, "num_state_layers": len(state.layers)}
    return said


if __name__ == "__main__":
    print(json.dumps(describe(*sys.argv[1:3])))
