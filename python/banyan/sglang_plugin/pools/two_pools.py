# SPDX-License-Identifier: Apache-2.0
"""The two pools of a model that keeps its sliding windows, or states, apart, and how its layers divide among them.

Of windows SGLang makes both of the classes that Banyan chooses, with an allocator each, and puts one pool and one
allocator in front. A token's slot in the pool of the windows is another one than in the pool of the other layers.
States lie beside the requests (``state_pool``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.state_pool import States, have_states, states_of


@dataclass(frozen=True, slots=True)
class Windows:
    """The pool of a model's windows.

    ``num_pages``: window pages that a prefix needs before its end. ``places``: for each layer, whether it is a window's
    (1) or not (0), and its number in that pool. ``share``: of the bytes of a page of all layers.
    """

    pool: Any
    allocator: QuarantiningAllocator
    num_pages: int
    places: tuple[tuple[int, int], ...]
    window_tokens: int
    share: float

    @property
    def layers(self) -> tuple[str, ...]:
        """In words, for the namespace of either kind of page."""
        return (f"{self.window_tokens} tokens", "".join("w" if part else "f" for part, _ in self.places))


@dataclass(frozen=True, slots=True)
class RankPools:
    """What a rank keeps KV in. ``pool`` has all ``num_layers``, or all but those of ``beside``."""

    pool: Any
    allocator: QuarantiningAllocator
    num_layers: int
    beside: Windows | States | None

    @property
    def in_use(self) -> list[Any]:
        """Every pool that has pages of its own."""
        return [self.pool] if self.beside is None else [self.pool, self.beside.pool]


def are_apart(pool: Any, allocator: Any) -> bool:
    """Whether these are in front of two pools of keys and values, which this module knows to take apart: one has the
    pages of every layer that the other has not, and both are allocated in pages."""
    if type(pool) is not SWAKVPool or type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        return False
    has_heads = all(isinstance(part, MHATokenToKVPool) for part in (pool.full_kv_pool, pool.swa_kv_pool))
    return has_heads and sorted(pool.layers_mapping) == list(range(pool.layer_num))


def pools_of(params: Any) -> RankPools:
    """From the parameters that SGLang hands to a linker; what is not to be shared has been refused before."""
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if have_states(pool, params):
        full, allocator, states = states_of(params)
        return RankPools(full, allocator, len(states.places), states)
    if not are_apart(pool, allocator):
        return RankPools(pool, allocator, pool.layer_num, None)
    full, window = pool.full_kv_pool, pool.swa_kv_pool
    full_bytes, window_bytes = (part.banyan_geometry.page.page_bytes for part in (full, window))
    numbers = {layer: (int(is_windowed), number) for layer, (number, is_windowed) in pool.layers_mapping.items()}
    return RankPools(
        full,
        allocator.full_attn_allocator,
        pool.layer_num,
        Windows(
            pool=window,
            allocator=allocator.swa_attn_allocator,
            num_pages=-(-params.swa_retain_window // params.page_size),
            places=tuple(numbers[layer] for layer in range(pool.layer_num)),
            window_tokens=params.swa_retain_window,
            share=window_bytes / (full_bytes + window_bytes),
        ),
    )
