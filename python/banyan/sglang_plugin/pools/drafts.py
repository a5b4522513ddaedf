# SPDX-License-Identifier: Apache-2.0
"""The pools of a draft model, which has a row of its own wherever the model has one: further extents of every page.

SGLang makes them behind the model's pool, with the same slots, and hands all of them to the linker when it builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_parallel

from banyan import _native
from banyan.layout import PoolGeometry
from banyan.refusals.speculation import draft_division_refusal, draft_pool_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools import host_pool
from banyan.sglang_plugin.pools.device_pool import Placed


def around_alloc_memory_pool(original: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """A draft's pools are made. On a host they lie behind the model's (that of full pages, where it has two), in the
    memory that peers map. Refuses a draft that SGLang has divided in another way than its model."""
    if runtime.is_sharing() and worker.draft_parallel_layout is not None:
        line = draft_division_refusal(
            num_draft_shards=worker.draft_parallel_layout.attn_tp_size, num_shards=get_parallel().attn_tp_size
        )
        if line is not None:
            runtime.refuse(line)
    allocator = kwargs.get("token_to_kv_pool_allocator")
    memory = None
    if allocator is not None and runtime.is_sharing() and not runtime.is_on_gpu():
        pool = allocator.get_kvcache()
        # Of a model with windows, in front of two. Without one, it is a pool that the linker refuses.
        memory = getattr(getattr(pool, "full_kv_pool", pool), "banyan_bytes", None)
    if memory is None:
        original(worker, *args, **kwargs)
        return
    with host_pool.laid_behind(memory):
        original(worker, *args, **kwargs)


def drafts_of(params: Any) -> tuple[Any, ...]:
    """The draft pools that SGLang hands to a linker, in the order in which they were made."""
    return (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)


@dataclass(frozen=True, slots=True)
class Together:
    """A pool and its drafts, as the ways to a pool know one pool; ``banyan_bytes`` on a host, ``banyan_extents`` on a
    GPU."""

    banyan_geometry: PoolGeometry
    device: Any
    banyan_bytes: _native.SharedBytes | None = None
    banyan_extents: Placed | None = None


def together(pool: Any, drafts: Sequence[Any]) -> Any:
    """What peers exchange pages of: ``pool`` itself where it has no drafts. Refuses drafts that have other pages."""
    if not drafts:
        return pool
    geometries = [draft.banyan_geometry for draft in drafts]
    num_pages = pool.banyan_geometry.num_pages
    for draft, geometry in zip(drafts, geometries, strict=True):
        if draft.page_size != pool.page_size or geometry.num_pages < num_pages:
            found = f"{geometry.num_pages} pages of {draft.page_size} tokens"
            runtime.refuse(draft_pool_refusal(f"{found}, the model's has {num_pages} of {pool.page_size}"))
    if not hasattr(pool, "banyan_extents"):
        return Together(pool.banyan_geometry.followed_by(geometries), pool.device, banyan_bytes=drafts[-1].banyan_bytes)
    page = pool.banyan_geometry.page.followed_by(geometry.page for geometry in geometries)
    addresses = [address for part in (pool, *drafts) for address, _ in part.banyan_extents]
    sizes = [size for layer in page.sizes for size in layer]
    return Together(
        PoolGeometry.stacked(page, num_pages),
        pool.device,
        banyan_extents=[(address, num_pages * size) for address, size in zip(addresses, sizes, strict=True)],
    )
