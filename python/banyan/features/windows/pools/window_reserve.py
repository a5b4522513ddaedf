# SPDX-License-Identifier: Apache-2.0
"""Room made a step ahead in both pools of a model with sliding windows.

SGLang puts one allocator in front of the two, and that one evicts for both without asking them. What the two want to
have beyond that is evicted behind it: on a GPU a freed page comes late, and what a peer has held for long is not
counted on.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator


def after_evict_to_free_tokens(result: None, allocator: Any, tree_cache: Any, num_tokens: int) -> None:
    """SGLang has evicted what ``num_tokens`` need in either pool."""
    parts = allocator.full_attn_allocator, allocator.swa_attn_allocator
    if not all(isinstance(part, QuarantiningAllocator) for part in parts):
        return
    if tree_cache is None or not tree_cache.supports_prefix_sharing():
        return
    for part, name in zip(parts, ("num_tokens", "swa_num_tokens"), strict=True):
        part.evict_from(tree_cache, name)
    full, window = (max(0, part.tokens_to_have(num_tokens) - part.available_size()) for part in parts)
    if full or window:
        tree_cache.evict_for_alloc(EvictParams(num_tokens=full, swa_num_tokens=window))
