# SPDX-License-Identifier: Apache-2.0
"""KV pools in memory that the other ranks can map.

Only where the bytes lie differs from upstream: shapes, strides, page numbers and the dummy page are the same. The
offsets come from ``PoolGeometry`` and from nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from banyan import _native
from banyan.layout import PageLayout, PoolGeometry
from banyan.refusals import pool_refusal
from banyan.refusals.start import pool_memory_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.pages import page_of_heads, page_of_latents

_front: _native.SharedBytes | None = None
"""The memory that pools are laid behind now; None: each gets its own."""


@contextlib.contextmanager
def laid_behind(memory: _native.SharedBytes) -> Iterator[None]:
    """Pools that are made meanwhile lie behind ``memory``, one behind the other: peers map one memory of each rank."""
    global _front
    _front = memory
    try:
        yield
    finally:
        _front = None


def allocated(make: Callable[[int, str], _native.SharedBytes], need_bytes: int, label: str) -> _native.SharedBytes:
    """Memory as ``make`` takes it. Refuses where there is none."""
    try:
        return make(need_bytes, label)
    except OSError as error:
        runtime.refuse(pool_memory_refusal(need_bytes=need_bytes, error=error))


def _allocate(page: PageLayout, num_pages: int) -> tuple[_native.SharedBytes, PoolGeometry]:
    global _front
    start = 0 if _front is None else _front.num_bytes
    geometry = PoolGeometry.stacked(page, num_pages, base_bytes=start)
    make = _native.SharedBytes.create if _front is None else _front.extended
    shared = allocated(make, geometry.num_bytes - start, "banyan-pool")
    if _front is not None:
        _front = shared
    return shared, geometry


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
        if not self.layer_num:
            # A draft has windows only: nothing is exchanged.
            super()._create_buffers_normal()
            return
        k_shape, v_shape = self._kv_buffer_shapes()
        rows_per_page = 1 if self.use_hnd else self.page_size
        shared, geometry = _allocate(page_of_heads(self), -(-k_shape[0] // rows_per_page))
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
        shared, geometry = _allocate(page_of_latents(self), -(-shape[0] // self.page_size))
        self.kv_buffer = [
            _view(shared, base_bytes=extent.base_bytes, shape=shape, dtype=self.store_dtype)
            for (extent,) in geometry.layers
        ]
        self.banyan_bytes, self.banyan_geometry = shared, geometry
