# SPDX-License-Identifier: Apache-2.0
"""KV pools on a GPU: upstream's own allocations, described so that peers can open them.

Nothing is laid out here. Where each page lies is read off the buffers that upstream has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

from banyan.layout import PageLayout, PoolGeometry
from banyan.refusals import pool_refusal
from banyan.refusals.models import index_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.pages import page_of_heads, page_of_latents

Placed = list[tuple[int, int]]
"""``(address, num_bytes)`` of each extent, layer by layer."""

Rows = tuple[torch.Tensor, int]
"""A buffer of shape ``[rows, ...]``, and how many of its rows a page has."""


def describe_buffers(page: PageLayout, layers: Sequence[Sequence[Rows]]) -> tuple[PoolGeometry, Placed]:
    """The geometry of a pool, and where its extents lie.

    ``layers[l]`` are the buffers of the parts of layer ``l``, contiguous. The geometry's bases are a numbering that
    peers share, not addresses. A last page that has fewer rows than others is none: SGLang never hands it out.

    Raises:
        ValueError: when a buffer is not what the page says.
    """
    num_pages = min(buffer.shape[0] // rows for buffers in layers for buffer, rows in buffers)
    placed: Placed = []
    for parts, buffers in zip(page.layers, layers, strict=True):
        for part, (buffer, rows) in zip(parts, buffers, strict=True):
            if not buffer.is_contiguous() or buffer[:rows].nbytes != part.page_bytes:
                raise ValueError(f"a buffer of shape {tuple(buffer.shape)} is no array of pages of {part}")
            placed.append((buffer.data_ptr(), num_pages * part.page_bytes))
    return PoolGeometry.stacked(page, num_pages), placed


class DeviceMHAPool(MHATokenToKVPool):
    """Multi-head or grouped-query pool on a GPU."""

    banyan_geometry: PoolGeometry
    banyan_extents: Placed

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout not in ("nhd", "hnd"):
            runtime.refuse(pool_refusal(pool_class=f"{self.kv_cache_layout} MHA pool", supported=("NHD", "HND")))
        super()._create_buffers_normal()
        if not self.layer_num:
            return  # A draft has windows only: nothing is exchanged.
        rows = 1 if self.use_hnd else self.page_size
        layers = [((keys, rows), (values, rows)) for keys, values in zip(self.k_buffer, self.v_buffer, strict=True)]
        self.banyan_geometry, self.banyan_extents = describe_buffers(page_of_heads(self), layers)


class DeviceMLAPool(MLATokenToKVPool):
    """Latent pool on a GPU."""

    banyan_geometry: PoolGeometry
    banyan_extents: Placed

    def _create_buffers(self) -> None:
        super()._create_buffers()
        layers = [((buffer, self.page_size),) for buffer in self.kv_buffer]
        self.banyan_geometry, self.banyan_extents = describe_buffers(page_of_latents(self), layers)


class KeysOfEachToken:
    """In front of SGLang's pool of latents and index keys. Refuses what a page of these does not describe: it has index
    keys of every layer and every token, in one row."""

    def __init__(self, *args: Any, index_head_dim: int, **kwargs: Any) -> None:
        line = index_refusal(
            tokens_per_key=kwargs.get("index_kpool", 1),
            num_without=sum(kwargs.get("skip_topk_layers") or ()),
            is_divided=kwargs.get("dcp_replicated", False),
        )
        if line is not None:
            runtime.refuse(line)
        # SGLang sets it behind the latents; their page is to have room for the keys before.
        self.index_head_dim = index_head_dim
        super().__init__(*args, index_head_dim=index_head_dim, **kwargs)  # type: ignore[call-arg]


class DeviceDSAPool(KeysOfEachToken, DSATokenToKVPool):
    """Latent pool with the keys of an indexer on a GPU."""

    banyan_geometry: PoolGeometry
    banyan_extents: Placed

    def _create_index_key_cache(self) -> Any:
        index: IndexKeyCache = super()._create_index_key_cache()
        layers = [((rows, self.page_size), (keys, 1)) for rows, keys in zip(self.kv_buffer, index.buffer, strict=True)]
        page = page_of_latents(self, index_dim=self.index_head_dim)
        self.banyan_geometry, self.banyan_extents = describe_buffers(page, layers)
        return index
