# SPDX-License-Identifier: Apache-2.0
"""The pools of a model that keeps its KV compressed (DeepSeek-V4), on a GPU: what goes with a full page, and what with
a window page.

Of each layer SGLang keeps the last tokens as they are, its window. Of all tokens, a layer that compresses has a row for
every 4 or every 128 of them, found by the tokens' slots, and in the former case an indexer's key beside each row. So
every layer has a part of a window page, and those that compress have a part of a full page too.

A layer that makes a row of 4 tokens looks at those before them as well. What it needs of them lies beside each window
page. One that makes a row of 128 keeps what it has of the next row with the request; 128 divides a page, so nothing of
that is left where a prefix ends.

What belongs to a page, and its bytes, is what SGLang's own prefill/decode pairs hand over for one. This module says
which layer each buffer is of, and refuses pools that have another set of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4LayerItem, DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.layout import PageLayout
from banyan.layout.page import COMPRESSED_LATENTS, COMPRESSOR_STATES, INDEX_KEYS, INDEXER_STATES, LATENTS, Part
from banyan.refusals.models import COMPRESSION_RATIOS, compressed_pool_refusal
from banyan.refusals.speculation import draft_pool_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.described_pool import DescribedPool
from banyan.sglang_plugin.pools.device_pool import describe_buffers
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.kind_pools import KindPools, RankPools, share_of_memory, two_kinds

Named = tuple[str, torch.Tensor]
"""What a buffer holds, and the buffer."""

Infos = Callable[[], tuple[list[int], list[int], list[int]]]
"""SGLang's account of buffers: their addresses, their bytes, the bytes of a page in each."""


def take_apart(components: set[Any], params: Any) -> RankPools | None:
    """Full pages of the layers that compress, and window pages of all layers."""
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if not isinstance(pool, DeepSeekV4TokenToKVPool):
        return None
    # Where windows are replayed, those of late layers are written for the end of a prompt alone.
    is_whole = components == {ComponentType.FULL, ComponentType.SWA} and not params.decoder_swa_bounded_replay
    if not (is_whole and _are_known(pool, allocator)):
        runtime.refuse(compressed_pool_refusal(f"a {type(pool).__name__} of {pool.pd_kv_layout()}"))
    items = _layers(pool)
    compressed, windowed = _compressed_parts(pool), _window_parts(pool)
    full = _described(pool, list(compressed), pool.get_contiguous_buf_infos, allocator.full_attn_allocator)
    window = _described(pool, list(windowed), pool.get_state_buf_infos, allocator.swa_attn_allocator)
    drafts = [_draft(draft, allocator.swa_attn_allocator) for draft in drafts_of(params)]
    ratios = "/".join(str(item.compress_ratio) for item in items)
    return RankPools(
        two_kinds(
            KindPools(pool=full, allocator=allocator.full_attn_allocator),
            KindPools(
                pool=window,
                allocator=allocator.swa_attn_allocator,
                drafts=drafts,
                sglang_name=PoolName.SWA,
                name="window",
                layers=(f"{params.swa_retain_window} tokens", ratios),
                share=share_of_memory(full, window),
                num_needed=-(-params.swa_retain_window // params.page_size),
                reached=_reached(items),
            ),
        ),
        len(items),
    )


def _are_known(pool: Any, allocator: Any) -> bool:
    """Whether windows and rows lie in pages, each with an allocator of Banyan's, and rows are of rates known here."""
    if type(pool) is not DeepSeekV4TokenToKVPool or type(allocator) is not SWATokenToKVPoolAllocator:
        return False
    parts = allocator.full_attn_allocator, allocator.swa_attn_allocator
    return (
        _are_in_pages(pool, allocator)
        and all(isinstance(part, QuarantiningAllocator) for part in parts)
        and set(pool.compression_ratios) <= COMPRESSION_RATIOS
        and runtime.is_on_gpu()
    )


def _are_in_pages(pool: Any, allocator: Any) -> bool:
    """Whether windows are, and each page of theirs is one row: smaller ones lie in it in another order."""
    if pool.request_window is not None or pool.unified_kv_pool is not None or allocator.swa_req_ring:
        return False
    return bool(pool.swa_kv_pool.page_size == pool.swa_page_size == pool.page_size == allocator.page_size)


def _layers(pool: Any) -> list[DeepSeekV4LayerItem]:
    """Of this stage of a pipeline: there is one."""
    return [item for item in pool.layer_mapping if item is not None]


def _reached(items: Iterable[DeepSeekV4LayerItem]) -> tuple[tuple[int, int], ...]:
    """As ``KindPools.reached``: a layer that compresses is one of both kinds."""
    num_compressed, reached = 0, []
    for num_layers, item in enumerate(items, 1):
        num_compressed += item.compress_ratio != 0
        reached.append((num_compressed, num_layers))
    return tuple(reached)


def _compressed_parts(pool: Any) -> Iterable[list[Named]]:
    """Of each layer that compresses, the buffers of a full page."""
    for item in _layers(pool):
        ratio, number = item.compress_ratio, item.compress_layer_id
        if ratio == 0:
            continue
        parts = [(f"{COMPRESSED_LATENTS} {ratio}", pool.kv_pools[ratio].kv_buffer[number])]
        if ratio in pool.index_pools:
            parts.append((INDEX_KEYS, pool.index_pools[ratio].contiguous_page_row_buffers()[number]))
        yield parts


def _window_parts(pool: Any) -> Iterable[list[Named]]:
    """Of each layer, the buffers of a window page."""
    for layer, window in enumerate(pool.swa_kv_pool.kv_buffer):
        parts = [(LATENTS, window)]
        for name, states in (
            (COMPRESSOR_STATES, pool.compress_state_pools),
            (INDEXER_STATES, pool.indexer_compress_state_pools),
        ):
            state = states[layer]
            if state is not None and not state.request_scoped:
                parts.append((name, state.kv_score_buffer.kv_score))
        yield parts


def _described(pool: Any, layers: Sequence[Sequence[Named]], infos: Infos, allocator: Any) -> DescribedPool:
    """What peers exchange pages of. Refuses buffers that are not those that SGLang hands over."""
    addresses, _, page_bytes = infos()
    sizes = dict(zip(addresses, page_bytes, strict=True))
    found = {buffer.data_ptr() for parts in layers for _, buffer in parts}
    if found != sizes.keys():
        runtime.refuse(compressed_pool_refusal(f"{len(found ^ sizes.keys())} buffers"))
    page = PageLayout(tuple(tuple(Part(name, sizes[rows.data_ptr()]) for name, rows in parts) for parts in layers))
    geometry, placed = describe_buffers(
        page, [[(rows, sizes[rows.data_ptr()] // rows[0].nbytes) for _, rows in parts] for parts in layers]
    )
    # Page 0 is a dummy, so the last one has the number of pages.
    if geometry.num_pages <= allocator.num_pages:
        runtime.refuse(compressed_pool_refusal(f"{geometry.num_pages} pages for {allocator.num_pages} and a dummy"))
    return DescribedPool(
        banyan_geometry=geometry,
        banyan_extents=placed,
        dtype=str(pool.dtype),
        kv_cache_layout=_layout_of(pool),
        layer_num=len(layers),
        start_layer=pool.start_layer,
        size=allocator.size,
        page_size=allocator.page_size,
        device=pool.device,
        # As SGLang's own tiers have it: a latent has no heads to be divided.
        is_replicated=True,
    )


def _layout_of(pool: Any) -> str:
    """What else two pools must have in common: rows are of what their states round to, and of how they are made."""
    states = [state for state in pool.compress_state_pools if state is not None]
    rates = ",".join(sorted({f"{one.ratio}:{one.kv_score_buffer.kv_score.dtype}:{one.online}" for one in states}))
    source = "bf16" if envs.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE.get() else "fp32"
    return f"{pool.pd_kv_layout()}/{rates}/{source}"


def _draft(draft: Any, allocator: Any) -> DescribedPool:
    """What a draft keeps: windows, at the slots of the model's. Refuses a draft that keeps anything else."""
    is_known = type(draft) is DeepSeekV4TokenToKVPool and set(draft.compression_ratios) == {0}
    if not is_known or draft.swa_req_ring_size or draft.swa_kv_pool.page_size != allocator.page_size:
        runtime.refuse(draft_pool_refusal(f"a {type(draft).__name__} of more than windows in pages"))
    return _described(draft, list(_window_parts(draft)), draft.get_state_buf_infos, allocator)
