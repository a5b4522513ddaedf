# SPDX-License-Identifier: Apache-2.0
"""The two pools of a model that keeps its sliding windows apart, and how its layers divide among them.

SGLang makes both of the classes that Banyan chooses, with an allocator each, and puts one pool and one allocator in
front. A token's slot in the pool of the windows is another one than in the pool of the other layers.

A draft's layers lie at the slots of the one or of the other, and go with the pages of those. A draft that has windows
too may keep them for every token, at the slots of full pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.refusals.speculation import draft_pool_refusal
from banyan.restorable import reached_in_turn
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.kind_pools import KindPools, RankPools, check_drafts, check_pool, two_kinds


def are_apart(pool: Any, allocator: Any) -> bool:
    """Whether these are in front of two pools of keys and values, which this module knows to take apart: one has the
    pages of every layer that the other has not, and both are allocated in pages."""
    if type(pool) is not SWAKVPool or type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        return False
    has_heads = all(isinstance(part, MHATokenToKVPool) for part in (pool.full_kv_pool, pool.swa_kv_pool))
    return has_heads and sorted(pool.layers_mapping) == list(range(pool.layer_num))


def drafts_apart(drafts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The pools of drafts at the slots of full pages, and those at the slots of window pages. Refuses the latter on a
    host, where a draft's pool lies behind that of full pages."""
    full: list[Any] = []
    windowed: list[Any] = []
    for draft in drafts:
        if not isinstance(draft, SWAKVPool):
            full.append(draft)
            continue
        if draft.full_kv_pool.layer_num:
            full.append(draft.full_kv_pool)
        if draft.swa_kv_pool.layer_num:
            (full if draft.swa_uses_full_indices else windowed).append(draft.swa_kv_pool)
    if windowed and not runtime.is_on_gpu():
        runtime.refuse(draft_pool_refusal("windows at the slots of the model's, on a host"))
    return full, windowed


def take_apart(components: set[Any], params: Any) -> RankPools | None:
    """Full pages, and those of the windows beside them."""
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if components != {ComponentType.FULL, ComponentType.SWA} or not are_apart(pool, allocator):
        return None
    full_drafts, window_drafts = drafts_apart(drafts_of(params))
    check_drafts(*full_drafts, *window_drafts, *params.mtp_draft_mamba_pools)
    check_pool(pool.full_kv_pool, allocator.full_attn_allocator)
    check_pool(pool.swa_kv_pool, allocator.swa_attn_allocator)
    numbers = {layer: (int(is_windowed), number) for layer, (number, is_windowed) in pool.layers_mapping.items()}
    places = tuple(numbers[layer] for layer in range(pool.layer_num))
    # As the pages of all layers divide into those of either kind.
    full_bytes = page_bytes(pool.full_kv_pool, *full_drafts)
    window_bytes = page_bytes(pool.swa_kv_pool, *window_drafts)
    window = KindPools(
        pool=pool.swa_kv_pool,
        allocator=allocator.swa_attn_allocator,
        drafts=window_drafts,
        sglang_name=PoolName.SWA,
        name="window",
        layers=(f"{params.swa_retain_window} tokens", "".join("w" if part else "f" for part, _ in places)),
        share=window_bytes / (full_bytes + window_bytes),
        num_needed=-(-params.swa_retain_window // params.page_size),
        reached=reached_in_turn(places),
    )
    full = KindPools(pool=pool.full_kv_pool, allocator=allocator.full_attn_allocator, drafts=full_drafts)
    return RankPools(two_kinds(full, window), pool.layer_num)


def page_bytes(*pools: Any) -> int:
    """What a page weighs, with what lies behind it."""
    return sum(pool.banyan_geometry.page.page_bytes for pool in pools)
