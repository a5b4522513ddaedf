# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls where it goes on from a state of its tree, and when a node has got one that it lacked when it was
offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.features.states.pools.state_pool import QuarantiningSlots
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker


def around_finalize_match_result_in_cache(
    finalize: Callable[..., Any], component: Any, params: Any, result: Any
) -> Any:
    """SGLang takes a slot for a copy of the state that was matched, and locks that only where it evicts itself: it must
    stay, and its pages, where Banyan's allocator evicts others in the place of what readers hold."""
    cache = component.cache
    slots = cache.req_to_token_pool.mamba_allocator
    if not isinstance(slots, QuarantiningSlots):
        return finalize(component, params, result)
    slots.evict_from(cache, "mamba_num")
    if not (params.cow_mamba and slots.may_wait):
        return finalize(component, params, result)
    locked = cache.inc_lock_ref(result.best_match_node)
    try:
        return finalize(component, params, result)
    finally:
        cache.dec_lock_ref(result.best_match_node, locked.to_dec_params())


def after_cleanup_after_caching_req(
    result: None, component: Any, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
) -> None:
    """A request has handed a state to SGLang's tree. Where the node was there before, without one, SGLang has offered
    it and does not offer it again."""
    if not runtime.is_sharing() or insert_result is None or insert_result.mamba_exist:
        return
    is_new = insert_result.prefix_len < len(insert_params.key)
    tree, node = component.cache.tree_core, insert_result.last_device_node
    if is_new or insert_params.mamba_value is None or tree.build_external_linker_offload_transfers(node) is not None:
        return
    keys, full = list(tree.get_hash_values(node)), tree.get_component_device_value(node, ComponentType.FULL)
    if keys and full is not None and len(full) == len(keys) * component.cache.page_size:
        linker.installed().offer_again(keys, full, (keys[-1:], insert_params.mamba_value))
