# SPDX-License-Identifier: Apache-2.0
"""What belongs to a page of each of SGLang's pools: from the pool's own sizes, on the host and on a GPU alike."""

from __future__ import annotations

from typing import Any

from banyan.layout import PageLayout


def page_of_heads(pool: Any) -> PageLayout:
    """Of a pool of keys and values."""
    return PageLayout.of_heads(
        num_layers=pool.layer_num,
        page_tokens=pool.page_size,
        num_heads=pool.head_num,
        head_dim=pool.head_dim,
        value_dim=pool.v_head_dim,
        element_bytes=pool.store_dtype.itemsize,
    )


def page_of_latents(pool: Any, *, index_dim: int = 0) -> PageLayout:
    """Of a pool of latents, with the keys of an indexer where it has one."""
    return PageLayout.of_latents(
        num_layers=pool.layer_num,
        page_tokens=pool.page_size,
        row_bytes=pool.kv_cache_dim * pool.store_dtype.itemsize,
        index_dim=index_dim,
    )
