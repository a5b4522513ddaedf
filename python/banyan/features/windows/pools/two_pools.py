# SPDX-License-Identifier: Apache-2.0
"""The two pools of a model that keeps its sliding windows apart, and how its layers divide among them.

SGLang makes both of the classes that Banyan chooses, with an allocator each, and puts one pool and one allocator in
front. A token's slot in the pool of the windows is another one than in the pool of the other layers.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.sglang_plugin.pools.kind_pools import KindPools, RankPools, check_pool, refuse_drafts, two_kinds


def are_apart(pool: Any, allocator: Any) -> bool:
    """Whether these are in front of two pools of keys and values, which this module knows to take apart: one has the
    pages of every layer that the other has not, and both are allocated in pages."""
    if type(pool) is not SWAKVPool or type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        return False
    has_heads = all(isinstance(part, MHATokenToKVPool) for part in (pool.full_kv_pool, pool.swa_kv_pool))
    return has_heads and sorted(pool.layers_mapping) == list(range(pool.layer_num))


def take_apart(components: set[Any], params: Any) -> RankPools | None:
    """Full pages, and those of the windows beside them."""
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if components != {ComponentType.FULL, ComponentType.SWA} or not are_apart(pool, allocator):
        return None
    refuse_drafts(params, "a pool beside sliding windows")
    check_pool(pool.full_kv_pool, allocator.full_attn_allocator)
    check_pool(pool.swa_kv_pool, allocator.swa_attn_allocator)
    numbers = {layer: (int(is_windowed), number) for layer, (number, is_windowed) in pool.layers_mapping.items()}
    places = tuple(numbers[layer] for layer in range(pool.layer_num))
    # As the pages of all layers divide into those of either kind.
    full_bytes, window_bytes = (part.banyan_geometry.page.page_bytes for part in (pool.full_kv_pool, pool.swa_kv_pool))
    window = KindPools(
        pool=pool.swa_kv_pool,
        allocator=allocator.swa_attn_allocator,
        sglang_name=PoolName.SWA,
        name="window",
        layers=(f"{params.swa_retain_window} tokens", "".join("w" if part else "f" for part, _ in places)),
        share=window_bytes / (full_bytes + window_bytes),
        num_needed=-(-params.swa_retain_window // params.page_size),
        places=places,
        told_as="windows",
    )
    full = KindPools(pool=pool.full_kv_pool, allocator=allocator.full_attn_allocator)
    return RankPools(two_kinds(full, window), pool.layer_num)
