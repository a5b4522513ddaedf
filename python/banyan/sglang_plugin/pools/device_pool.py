# SPDX-License-Identifier: Apache-2.0
"""KV pools on a GPU: upstream's own allocations, described so that peers can open them.

Nothing is laid out here. Where each page lies is read off the buffers that upstream has made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from banyan.layout import PoolGeometry
from banyan.refusals import pool_refusal
from banyan.sglang_plugin import runtime

Placed = list[tuple[int, int]]
"""``(address, num_bytes)`` of each extent, layer by layer."""


def describe_buffers(layers: Sequence[Sequence[torch.Tensor]], rows_per_page: int) -> tuple[PoolGeometry, Placed]:
    """The geometry of a pool, and where its extents lie.

    ``layers[l]`` are the buffers of layer ``l``, of shape ``[rows, ...]``, contiguous. The geometry's bases are a
    numbering that peers share, not addresses. A last page that has fewer rows than others is none: SGLang never hands
    it out.
    """
    num_pages = min(buffer.shape[0] // rows_per_page for buffers in layers for buffer in buffers)
    page_bytes = [buffer[:rows_per_page].nbytes for buffer in layers[0]]
    geometry = PoolGeometry.stacked(num_layers=len(layers), num_pages=num_pages, page_bytes=page_bytes)
    placed: Placed = []
    for buffers in layers:
        for buffer, size in zip(buffers, page_bytes, strict=True):
            if not buffer.is_contiguous() or buffer[:rows_per_page].nbytes != size:
                raise ValueError(f"a buffer of shape {tuple(buffer.shape)} is no array of pages of {size} bytes")
            placed.append((buffer.data_ptr(), num_pages * size))
    return geometry, placed


class DeviceMHAPool(MHATokenToKVPool):
    """Multi-head or grouped-query pool on a GPU."""

    banyan_geometry: PoolGeometry
    banyan_extents: Placed

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout not in ("nhd", "hnd"):
            runtime.refuse(pool_refusal(pool_class=f"{self.kv_cache_layout} MHA pool", supported=("NHD", "HND")))
        super()._create_buffers_normal()
        layers = list(zip(self.k_buffer, self.v_buffer, strict=True))
        self.banyan_geometry, self.banyan_extents = describe_buffers(layers, 1 if self.use_hnd else self.page_size)


class DeviceMLAPool(MLATokenToKVPool):
    """Latent pool on a GPU."""

    banyan_geometry: PoolGeometry
    banyan_extents: Placed

    def _create_buffers(self) -> None:
        super()._create_buffers()
        layers = [(buffer,) for buffer in self.kv_buffer]
        self.banyan_geometry, self.banyan_extents = describe_buffers(layers, self.page_size)
