# SPDX-License-Identifier: Apache-2.0
"""The pool of a model's states (state space, linear attention), where peers can map it or open it, and its slots.

A request works on a state in place. SGLang keeps copies of it at some lengths, each in a slot that belongs to its tree
until it is freed, and that nobody writes to meanwhile. Only such slots are offered to peers.

Invariants
  1. On a host, memory differs from upstream in where it lies; shapes, strides and slot numbers are the same. On a GPU
     it is upstream's own, described. Slot 0 is a dummy.
  2. A slot is handed out, free (upstream's list), or in quarantine: freed while a peer reads it. On a GPU it may be on
     its way as well (``device_numbers``). SGLang evicts no state ahead: one that is freed because it is needed is
     waited for, behind the forward in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, MambaPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan import _native
from banyan.layout import PageLayout, PoolGeometry
from banyan.pacing.lockstep import READER_PATIENCE_S
from banyan.restorable import reached_in_turn
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.described_pool import DescribedPool
from banyan.sglang_plugin.pools.device_numbers import NumbersOnDevice
from banyan.sglang_plugin.pools.device_pool import describe_buffers
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.host_pool import allocated
from banyan.sglang_plugin.pools.kind_pools import (
    KindPools,
    RankPools,
    check_drafts,
    check_pool,
    share_of_memory,
    two_kinds,
)
from banyan.sglang_plugin.pools.quarantine import NO_PAGES, Quarantine, frame_array


class QuarantiningSlots(Quarantine, MambaSlotAllocator):
    """Upstream's slots of states; a freed slot passes through the rank's frame table first."""

    page_size = 1
    free_slots: torch.Tensor

    num_uncounted_tokens = 0
    """A slot has no tokens."""

    decodes_on_held = True
    """Whether a batch is planned with slots that peers are still reading."""

    @property
    def num_pages(self) -> int:
        return int(self.size)

    @property
    def may_wait(self) -> bool:
        """Whether an allocation may have to wait for slots that are free."""
        return self._num_held > 0

    def available_size(self) -> int:
        return super().available_size() + self._num_held

    def schedulable_available_size(self) -> int:
        return self.available_size() if self.decodes_on_held else self.available_size() - self._num_held

    def free(self, free_index: torch.Tensor) -> None:
        if self._cache is not None and free_index.numel():
            free_index = self._withdraw(frame_array(free_index), free_index)
        super().free(free_index)

    def clear(self) -> None:
        super().clear()
        self._quarantine, self._not_withdrawn = {}, NO_PAGES
        if self._cache is not None:
            self.free_slots = self._withdraw(np.arange(1, self.size + 1, dtype=np.int64), self.free_slots)

    def alloc_group_begin(self, num_reqs: int) -> None:
        # So many at once save SGLang time. They are worth no wait: without them each request allocates by itself.
        super().alloc_group_begin(num_reqs if num_reqs <= len(self.free_slots) else 0)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        # One shard that evicted alone would have another tree from then on.
        return self._if_all_shards_got(super().alloc(need_size))

    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        allocate = super()._do_alloc
        return self._when_readers_let_go(lambda: allocate(need_size), READER_PATIENCE_S)

    def _put_back(self, page_ids: torch.Tensor) -> None:
        super().free(page_ids)


class DeviceSlots(NumbersOnDevice, QuarantiningSlots):
    """The same, where slot numbers live on a GPU."""

    def alloc_group_begin(self, num_reqs: int) -> None:
        # What SGLang does not use of them would come back behind the forward in flight, and the next request wait.
        super().alloc_group_begin(0)

    def free(self, free_index: torch.Tensor) -> None:
        if self._lane is None:
            super().free(free_index)
        else:
            # SGLang frees a part of a table by this name, and writes the next request's slots there.
            self._send_freed(free_index.to(torch.int64, copy=True))

    def clear(self) -> None:
        self._forget_lane()
        super().clear()


def after_init_mamba_pool(result: None, slots: HybridReqToTokenPool, *args: Any, **kwargs: Any) -> None:
    """SGLang has made a pool of states and its allocator: share the one, and put Banyan's in place of the other, where
    it is known how."""
    if runtime.is_sharing():
        share_states(slots)


def share_states(slots: HybridReqToTokenPool) -> None:
    """Lay the states into memory that peers can map, or on a GPU say where they lie. Nothing has been written to them
    yet."""
    pool = slots.mamba_pool
    tensors = _tensors(pool)
    if not tensors or len({tensor.shape[:2] for tensor in tensors}) > 1:
        return  # Refused by the linker, when it is built.
    on_gpu = runtime.is_on_gpu()
    if on_gpu and not all(tensor[0].is_contiguous() for tensor in tensors):
        return  # The same.
    placed = _described(pool, tensors) if on_gpu else _laid_out(pool, tensors)
    pool.banyan_states = DescribedPool(
        **placed,
        dtype="/".join(str(tensor.dtype) for tensor in tensors),
        kv_cache_layout="/".join("x".join(map(str, tensor.shape[2:])) for tensor in tensors),
        layer_num=tensors[0].shape[0],
        start_layer=slots.start_layer,
        size=pool.size,
        device=tensors[0].device if on_gpu else "cpu",
    )
    kind = DeviceSlots if on_gpu else QuarantiningSlots
    slots.mamba_allocator = kind(pool.size, slots.mamba_allocator.device)


def _described(pool: MambaPool, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Where upstream's own allocations lie."""
    layers = [[(tensor[layer], 1) for tensor in tensors] for layer in range(tensors[0].shape[0])]
    geometry, placed = describe_buffers(page_of_states(pool), layers)
    return {"banyan_geometry": geometry, "banyan_extents": placed}


def _laid_out(pool: MambaPool, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Other memory in place of upstream's, of the same shapes."""
    geometry = PoolGeometry.by_part(page_of_states(pool), tensors[0].shape[1])
    shared = allocated(_native.SharedBytes.create, geometry.num_bytes, "banyan-states")
    views = [
        torch.frombuffer(shared, dtype=tensor.dtype, count=tensor.numel(), offset=extent.base_bytes).view(tensor.shape)
        for tensor, extent in zip(tensors, geometry.layers[0], strict=True)
    ]
    temporal = views.pop(0) if pool.mamba_cache.temporal.numel() else pool.mamba_cache.temporal
    pool.mamba_cache = replace(pool.mamba_cache, temporal=temporal, conv=views)
    return {"banyan_geometry": geometry, "banyan_bytes": shared}


def page_of_states(pool: MambaPool) -> PageLayout:
    """What belongs to one state, from the pool's own tensors."""
    cache = pool.mamba_cache
    return PageLayout.of_states(
        num_layers=pool.num_mamba_layers,
        recurrent_bytes=_slot_bytes(cache.temporal) if cache.temporal.numel() else 0,
        convolution_bytes=[_slot_bytes(conv) for conv in cache.conv],
    )


def _tensors(pool: MambaPool) -> Sequence[torch.Tensor]:
    """[layers, slots, ...] each, in the order of a page's parts."""
    return [tensor for tensor in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if tensor.numel()]


def _slot_bytes(tensor: torch.Tensor) -> int:
    return tensor[0, 0].numel() * tensor.element_size()


def have_states(pool: Any, params: Any) -> bool:
    """Whether ``pool`` is in front of keys and values, with states beside it, and both are of kinds that this module
    knows: states lie in memory that was laid out or described here, one for each slot, and nothing else goes with a
    slot."""
    if type(pool) is not HybridLinearKVPool:
        return False
    slots = params.req_to_token_pool
    if type(slots.mamba_allocator) not in (QuarantiningSlots, DeviceSlots):
        return False
    has_more = slots.mamba_ckpt_pool is not None or slots.short_conv_pool.enabled or slots.ngram_pool.enabled
    replays = slots.mamba_pool.mamba_cache.replayssm_g is not None
    layers = sorted((*pool.full_attention_layer_id_mapping, *slots.mamba_map))
    has_each_layer_once = layers == list(range(pool.start_layer, pool.start_layer + len(layers)))
    return slots.enable_mamba_extra_buffer and has_each_layer_once and not (has_more or replays)


def take_apart(components: set[Any], params: Any) -> RankPools | None:
    """Full pages, and the states beside them: a length needs one, at its end."""
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if components != {ComponentType.FULL, ComponentType.MAMBA} or not have_states(pool, params):
        return None
    slots = params.req_to_token_pool
    # Of such a model's own next layer, SGLang puts a pool of the same kind in front.
    drafts = [draft.full_kv_pool if isinstance(draft, HybridLinearKVPool) else draft for draft in drafts_of(params)]
    check_drafts(*drafts, *params.mtp_draft_mamba_pools)
    check_pool(pool.full_kv_pool, allocator)
    shared = slots.mamba_pool.banyan_states
    numbers = {layer: (0, number) for layer, number in pool.full_attention_layer_id_mapping.items()}
    numbers |= {layer: (1, number) for layer, number in slots.mamba_map.items()}
    places = tuple(numbers[layer] for layer in sorted(numbers))
    state = KindPools(
        pool=shared,
        allocator=slots.mamba_allocator,
        sglang_name=PoolName.MAMBA,
        name="state",
        # Keys and values too are of what a state rounds to.
        layers=("".join("s" if part else "f" for part, _ in places), shared.dtype),
        share=share_of_memory(pool.full_kv_pool, shared),
        num_needed=1,
        reached=reached_in_turn(places),
        is_one_slot=True,
    )
    full = KindPools(pool=pool.full_kv_pool, allocator=allocator, drafts=drafts)
    # SGLang tells the pool of keys and values alone.
    return RankPools(two_kinds(full, state), len(places), waiting=(slots,))
