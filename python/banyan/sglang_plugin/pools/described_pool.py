# SPDX-License-Identifier: Apache-2.0
"""Pages that SGLang keeps in no pool of their own: as the ways to a pool know one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from banyan import _native
from banyan.layout import PoolGeometry
from banyan.sglang_plugin.pools.device_pool import Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedPool:
    """Pages of one kind. ``banyan_bytes`` on a host, ``banyan_extents`` on a GPU.

    Attributes:
        dtype, kv_cache_layout: in words, what else than sizes two such pools must have in common.
        size: in slots.
        page_size: slots of a page.
        is_replicated: each shard of a rank has all of it.
    """

    banyan_geometry: PoolGeometry
    dtype: str
    kv_cache_layout: str
    layer_num: int
    start_layer: int
    size: int
    device: Any
    page_size: int = 1
    is_replicated: bool = False
    banyan_bytes: _native.SharedBytes | None = None
    banyan_extents: Placed | None = None
