# SPDX-License-Identifier: Apache-2.0
"""Models as data: what a token's KV weighs and what a token's work is. ``data/llms.toml`` read into frozen values.

Work is counted as is usual: 2 FLOP for each active parameter and token; attention's two products for each pair of a
query and a token that it attends to; the indexer's product for each pair of a query and a token of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from banyan.layout.page import INDEX_KEYS, PageLayout
from banyan_lab.sim.hardware import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Llm:
    """An architecture. Fields that do not apply to its kind of attention are 0."""

    title: str
    attention: str
    num_layers: int
    full_layers: int
    num_heads: int
    total_params: float
    active_params: float
    weight_bytes_per_param: float
    source: str
    expert_params: float = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    kv_bytes_per_element: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    kv_bytes_per_token_layer: int = 0
    topk_tokens: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def attention_bytes_per_token(self) -> float:
        """KV of one token over all layers that keep all tokens, without what an indexer adds."""
        return _bytes_of_token(self) - self.index_bytes_per_token

    @property
    def index_bytes_per_token(self) -> float:
        """What an indexer adds."""
        return _bytes_of_token(self, INDEX_KEYS)

    @property
    def kv_bytes_per_token(self) -> float:
        """What is stored and moved for one token: KV and the indexer's keys."""
        return _bytes_of_token(self)

    @property
    def weight_bytes(self) -> float:
        return self.total_params * self.weight_bytes_per_param

    def weight_bytes_on(self, num_gpus: int) -> float:
        """On each of so many GPUs: a part of the experts and all of the rest; of a dense model, a part of all."""
        spread = self.expert_params or self.total_params
        return (self.total_params - spread + spread / num_gpus) * self.weight_bytes_per_param

    @property
    def linear_flops_per_token(self) -> float:
        return 2 * self.active_params

    @property
    def pair_flops(self) -> float:
        """Attention of one query to one token, over all full layers."""
        if self.attention == "gqa":
            return self.full_layers * 4 * self.num_heads * self.head_dim
        return self.full_layers * 2 * self.num_heads * (2 * self.latent_dim + self.rope_dim)

    @property
    def index_pair_flops(self) -> float:
        return self.full_layers * 2 * self.index_heads * self.index_dim

    def attention_flops(self, *, new_tokens: float, cached_tokens: float) -> float:
        """Attention and indexing of ``new_tokens`` behind ``cached_tokens``; each query sees half of the new ones."""
        context = cached_tokens + new_tokens / 2
        attended = min(context, self.topk_tokens) if self.topk_tokens else context
        return new_tokens * (attended * self.pair_flops + context * self.index_pair_flops)

    def prefill_flops(self, *, new_tokens: float, cached_tokens: float) -> float:
        return new_tokens * self.linear_flops_per_token + self.attention_flops(
            new_tokens=new_tokens, cached_tokens=cached_tokens
        )


@cache
def _bytes_of_token(model: Llm, part: str = "") -> int:
    """What a page of one token weighs, or one part of it, as servers lay pages out."""
    if model.attention == "gqa":
        page = PageLayout.of_heads(
            num_layers=model.full_layers,
            page_tokens=1,
            num_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            value_dim=model.head_dim,
            element_bytes=model.kv_bytes_per_element,
        )
    else:
        page = PageLayout.of_latents(
            num_layers=model.full_layers,
            page_tokens=1,
            row_bytes=model.kv_bytes_per_token_layer,
            index_dim=model.index_dim,
        )
    return page.bytes_by_name.get(part, 0) if part else page.page_bytes


@cache
def llm(name: str) -> Llm:
    """Raises KeyError for a model that ``data/llms.toml`` does not have."""
    return Llm(**table("llms")[name])


def cache_compute_ratio(model: Llm, *, context_tokens: int, append_tokens: int) -> float:
    """GB of KV to load for each PFLOP of prefill: the context is cached, the append is computed.

    As published in DualPath (arXiv 2602.21548), whose figures count attention's KV only, not an indexer's keys.
    """
    flops = append_tokens * (
        model.linear_flops_per_token
        + min(context_tokens, model.topk_tokens or context_tokens) * model.pair_flops
        + context_tokens * model.index_pair_flops
    )
    return context_tokens * model.attention_bytes_per_token / 1e9 / (flops / 1e15)
