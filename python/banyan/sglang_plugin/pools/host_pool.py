# SPDX-License-Identifier: Apache-2.0
"""KV pools in memory that the other ranks can map.

Only where the bytes lie differs from upstream: shapes, strides, page numbers and the dummy page are the same. The
offsets come from ``PoolGeometry`` and from nowhere else.
"""

from __future__ import annotations

import psutil
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from banyan import _native
from banyan.layout import PoolGeometry
from banyan.refusals import memory_refusal, pool_refusal
from banyan.refusals.start import pool_memory_refusal
from banyan.sglang_plugin import runtime


def _allocate(geometry: PoolGeometry) -> _native.SharedBytes:
    need_bytes = geometry.num_bytes
    line = memory_refusal(need_bytes=need_bytes, available_bytes=psutil.virtual_memory().available)
    if line is not None:
        runtime.refuse(line)
    try:
        return _native.SharedBytes.create(need_bytes, "banyan-pool")
    except OSError as error:
        runtime.refuse(pool_memory_refusal(need_bytes=need_bytes, error=error))


def _view(shared: _native.SharedBytes, *, base_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shape`` on the shared bytes; it keeps them mapped."""
    return torch.frombuffer(shared, dtype=dtype, count=torch.Size(shape).numel(), offset=base_bytes).view(shape)


class SharedMHAPool(MHATokenToKVPool):
    """Multi-head or grouped-query pool: K and V of a layer are two adjacent extents."""

    banyan_bytes: _native.SharedBytes
    banyan_geometry: PoolGeometry

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout not in ("nhd", "hnd"):
            runtime.refuse(pool_refusal(pool_class=f"{self.kv_cache_layout} MHA pool", supported=("NHD", "HND")))
        k_shape, v_shape = self._kv_buffer_shapes()
        rows_per_page = 1 if self.use_hnd else self.page_size
        num_pages = -(-k_shape[0] // rows_per_page)
        itemsize = self.store_dtype.itemsize
        geometry = PoolGeometry.stacked(
            num_layers=self.layer_num,
            num_pages=num_pages,
            page_bytes=[rows_per_page * torch.Size(shape[1:]).numel() * itemsize for shape in (k_shape, v_shape)],
        )
        shared = _allocate(geometry)
        self.k_buffer, self.v_buffer = [], []
        for k_extent, v_extent in geometry.layers:
            self.k_buffer.append(_view(shared, base_bytes=k_extent.base_bytes, shape=k_shape, dtype=self.store_dtype))
            self.v_buffer.append(_view(shared, base_bytes=v_extent.base_bytes, shape=v_shape, dtype=self.store_dtype))
        self.banyan_bytes, self.banyan_geometry = shared, geometry


class SharedMLAPool(MLATokenToKVPool):
    """Latent pool: one extent for each layer."""

    banyan_bytes: _native.SharedBytes
    banyan_geometry: PoolGeometry

    def _create_buffers(self) -> None:
        shape = (self.size + self.page_size, 1, self.kv_cache_dim)
        row_bytes = self.kv_cache_dim * self.store_dtype.itemsize
        geometry = PoolGeometry.stacked(
            num_layers=self.layer_num,
            num_pages=-(-shape[0] // self.page_size),
            page_bytes=[self.page_size * row_bytes],
        )
        shared = _allocate(geometry)
        self.kv_buffer = [
            _view(shared, base_bytes=extent.base_bytes, shape=shape, dtype=self.store_dtype)
            for (extent,) in geometry.layers
        ]
        self.banyan_bytes, self.banyan_geometry = shared, geometry
