# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls when a node of its tree has got a window that it lacked when it was offered."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.cache_action import RecoverSWAWithLockedFull, SWARebuild

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker


def after_apply_component_action(result: None, component: Any, action: Any) -> None:
    """A node of SGLang's tree has got its window pages. Where it was a tombstone, SGLang has offered it before and does
    not offer it again."""
    if not runtime.is_sharing() or not isinstance(action, (SWARebuild, RecoverSWAWithLockedFull)):
        return
    tree, node = component.cache.tree_core, action.node_id
    if tree.build_external_linker_offload_transfers(node) is not None:
        return
    keys = list(tree.get_hash_values(node))
    full = action.source_value if isinstance(action, SWARebuild) else action.kept_full
    if keys and len(full) == len(keys) * component.cache.page_size:
        window = component.cache.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(full)
        linker.installed().offer_again(keys, full, (keys, window))
