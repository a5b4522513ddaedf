# SPDX-License-Identifier: Apache-2.0
"""What SGLang calls when a node of its tree has got a state that it lacked when it was offered."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import linker


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
