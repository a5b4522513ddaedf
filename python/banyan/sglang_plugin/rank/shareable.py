# SPDX-License-Identifier: Apache-2.0
"""Whether a rank's tree and pools are of a kind that Banyan knows how to share."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.refusals import pool_refusal
from banyan.refusals.speculation import draft_pool_refusal
from banyan.refusals.start import components_refusal, pool_layout_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.choose import POOLS
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.state_pool import have_states
from banyan.sglang_plugin.pools.two_pools import are_apart


def check_shareable(components: set[Any], params: Any) -> None:
    """Refuse what Banyan does not know how to share. ``components``: of SGLang's tree; ``params``: its own."""
    allocator = params.token_to_kv_pool_allocator
    front, drafts = allocator.get_kvcache(), (*drafts_of(params), *params.mtp_draft_mamba_pools)
    if components == {ComponentType.FULL, ComponentType.MAMBA} and have_states(front, params):
        if drafts:
            runtime.refuse(draft_pool_refusal("a pool beside states"))
        parts: tuple[tuple[Any, Any], ...] = ((front.full_kv_pool, allocator),)
    elif components == {ComponentType.FULL, ComponentType.SWA} and are_apart(front, allocator):
        if drafts:
            runtime.refuse(draft_pool_refusal("a pool beside sliding windows"))
        parts = ((front.full_kv_pool, allocator.full_attn_allocator), (front.swa_kv_pool, allocator.swa_attn_allocator))
    elif components != {ComponentType.FULL}:
        runtime.refuse(components_refusal([component.name for component in components]))
    else:
        parts = ((front, allocator),)
    for pool, pages in parts:
        _check_pool(pool, pages)
    for draft in drafts:
        if not isinstance(draft, POOLS) or not hasattr(draft, "banyan_geometry"):
            runtime.refuse(draft_pool_refusal(f"a {type(draft).__name__}"))


def _check_pool(pool: Any, allocator: Any) -> None:
    if not isinstance(pool, POOLS) or not isinstance(allocator, QuarantiningAllocator):
        runtime.refuse(pool_refusal(pool_class=type(pool).__name__, supported=("MHA", "MLA", "DSA")))
    if not hasattr(pool, "banyan_geometry"):
        runtime.refuse(pool_layout_refusal())
