# SPDX-License-Identifier: Apache-2.0
"""A pool of latents and index keys in memory that other ranks map: models with index keys need a GPU, and what a page
of two parts goes through is tried here without one."""

from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from banyan.sglang_plugin.pools import host_pool
from banyan.sglang_plugin.pools.device_pool import KeysOfEachToken
from banyan.sglang_plugin.pools.host_pool import SharedMLAPool
from banyan.sglang_plugin.pools.pages import page_of_latents


class SharedDSAPool(KeysOfEachToken, DSATokenToKVPool, SharedMLAPool):
    """Latent pool with the keys of an indexer: two adjacent extents for each layer."""

    def _create_buffers(self) -> None:
        shape = (self.size + self.page_size, 1, self.kv_cache_dim)
        page = page_of_latents(self, index_dim=self.index_head_dim)
        shared, geometry = host_pool._allocate(page, -(-shape[0] // self.page_size))
        self.kv_buffer = [
            host_pool._view(shared, base_bytes=latents.base_bytes, shape=shape, dtype=self.store_dtype)
            for latents, _ in geometry.layers
        ]
        self.banyan_bytes, self.banyan_geometry = shared, geometry

    def _create_index_key_cache(self) -> IndexKeyCache:
        return SharedIndexKeys(self, self.index_buf_size)


class SharedIndexKeys(IndexKeyCache):
    """Upstream's index keys, in the memory of the pool."""

    def __init__(self, pool: SharedDSAPool, index_buf_size: int) -> None:
        self.pool = pool
        num_pages = (index_buf_size + pool.page_size + 1) // pool.page_size
        dtype, shape = pool.index_k_with_scale_buffer_dtype, self._buffer_shape(num_pages)
        self.buffer = []
        for _, keys in pool.banyan_geometry.layers:
            if num_pages > keys.num_pages or shape[1] * dtype.itemsize != keys.page_bytes:
                raise ValueError(f"index keys of shape {shape} do not fit into {keys}")
            self.buffer.append(host_pool._view(pool.banyan_bytes, base_bytes=keys.base_bytes, shape=shape, dtype=dtype))
