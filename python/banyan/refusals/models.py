# SPDX-License-Identifier: Apache-2.0
"""Models whose caches Banyan does not know, told from their configuration, before weights are loaded: pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model keeps for each token or request. Defaults are full attention alone."""

    architecture: str = ""
    steps_together_on_cpu: bool = False
    has_window: bool = False
    has_sinks: bool = False
    has_states: bool = False
    has_side_states: bool = False
    """Whether more than a state goes with a request, in the same slots."""
    has_index_keys: bool = False
    has_pooled_index_keys: bool = False
    has_compressed_kv: bool = False
    compression_ratios: frozenset[int] = frozenset()
    """Tokens of a row of compressed KV, over all layers; 0 for a layer that compresses nothing."""
    has_sparse_kv: bool = False
    num_kv_heads: int = 0
    takes_media: bool = False
    """Whether there are numbers in a prompt that stand for images, video or sound."""
    is_encoder_decoder: bool = False
    attends_to_what_follows: bool = False
    """Or may, as far as SGLang says; of ``ENCODERS`` it does not."""


COMPRESSION_RATIOS = frozenset({0, 4, 128})
"""DeepSeek-V4's. Of other rates several layers share the rows of one."""

ENCODERS = frozenset(
    {
        *("BertForSequenceClassification", "XLMRobertaForSequenceClassification", "Lfm2BidirectionalModel"),
        # Diffusion, without its --dllm-algorithm too.
        *("LLaDA2MoeModelLM", "SDARForCausalLM", "SDARMoeForCausalLM"),
    }
)
"""In these, too, each token sees those behind it: a prefix's KV depends on the whole prompt, and no key says so."""

LLAMAS = ("IQuestCoder", "InternLM3", "Llama", "Ministral3", "Mistral", "Phi3", "TeleFLM")
SPLIT_VOCABULARIES = frozenset(f"{name}ForCausalLM" for name in LLAMAS)
"""SGLang divides the vocabulary of these over all ranks of the TP group, under attention data parallelism too."""

SPLIT_DRAFTS = frozenset({"LlamaForCausalLMEagle", "MiMoMTP", "Qwen2ForCausalLMEagle"})
"""And of these drafts."""


def draft_vocabulary_refusal(architecture: str) -> str | None:
    """The line for a draft of ranks that step together on the CPU, or None."""
    if architecture not in SPLIT_DRAFTS:
        return None
    return (
        f"--speculative-draft-model-path: SGLang divides the vocabulary of {architecture} over ranks that have other "
        "tokens each; on the CPU they stand still when one is idle: use --dp N alone, or a draft of EAGLE3"
    )


def model_refusal(facts: ModelFacts) -> str | None:
    """The line for a model that caches more than the KV of attention, or None. Windows, alone or beside KV that is
    compressed as DeepSeek-V4's, and states alone have features of their own."""
    if facts.attends_to_what_follows or facts.architecture in ENCODERS:
        return (
            f"this model ({facts.architecture}) attends to what follows, or may, so that equal beginnings have other "
            "KV: use --banyan-share off, and --disable-radix-cache, without which SGLang mistakes them as well"
        )
    if facts.steps_together_on_cpu and facts.architecture in SPLIT_VOCABULARIES:
        return (
            f"--enable-dp-attention, --attn-dp-size: SGLang divides the vocabulary of {facts.architecture} over "
            "ranks that have other tokens each; on the CPU they stand still when one is idle: use --dp N alone, or a "
            "mixture-of-experts model"
        )
    if facts.is_encoder_decoder:
        return (
            f"this model ({facts.architecture}) puts an image's tokens before the prompt's, and SGLang ends when a "
            "cached prefix stops between them, as one of whole pages does: use --banyan-share off with --page-size 1"
        )
    kept = [
        words
        for is_kept, words in (
            (facts.has_window, "sliding-window KV"),
            (facts.has_states, "state-space states"),
            (facts.has_pooled_index_keys, "index keys of several tokens each"),
            (facts.has_compressed_kv and _is_unknown(facts), "KV that is compressed at other rates than 4 and 128"),
            (facts.has_sparse_kv, "sparse KV"),
        )
        if is_kept
    ]
    if not kept or kept in (["sliding-window KV"], ["state-space states"]):
        return None
    return (
        f"this model ({facts.architecture}) caches {' and '.join(kept)}; only full attention, and windows or states "
        "beside it, are shared: use --banyan-share off"
    )


def _is_unknown(facts: ModelFacts) -> bool:
    return not facts.compression_ratios <= COMPRESSION_RATIOS


def compressed_pool_refusal(found: str) -> str:
    """The line for pools of compressed KV that are not as DeepSeek-V4's are on an NVIDIA GPU."""
    return (
        f"SGLang lays this model's compressed KV out in a way that is not known here ({found}): use --banyan-share off"
    )


def index_refusal(*, tokens_per_key: int, num_without: int, is_divided: bool) -> str | None:
    """The line for index keys that do not lie beside the KV of every layer and token, or None when they do."""
    if tokens_per_key > 1:
        why = f"each of its index keys is of {tokens_per_key} tokens, and the last one's lies with the request"
    elif num_without:
        why = f"{num_without} of its layers keep no index keys"
    elif is_divided:
        why = "its index keys are divided in another way than its KV"
    else:
        return None
    return f"this model's KV pool keeps index keys in a way that is not shared ({why}): use --banyan-share off"
