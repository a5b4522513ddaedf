# SPDX-License-Identifier: Apache-2.0
"""What a rank does with its flags when it starts, and a dry run would not see: SGLang's tree is built, over no pool,
and a page is hashed. Flags that change the cache (its core, sessions, what goes first) are read by nothing earlier.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from banyan.sglang_plugin import page_hash


def build(server_args: Any) -> str:
    """What the tree of these arguments, which are resolved, is; raises what a rank would raise over them, whatever that
    is. Where components lie beside full pages, as windows do, their part of the tree needs their pools, and is not
    tried."""
    view = resolved_view(server_args)
    page_hash.prepare(view.page_size)
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=bool(view.disable_radix_cache),
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=view.page_size,
            eviction_policy=view.radix_eviction_policy,
            eviction_policy_config=view.radix_eviction_policy_config,
            enable_session_radix_cache=view.enable_session_radix_cache,
            tree_components=(ComponentType.FULL,),
        )
    )
    tokens = array("q", range(2 * view.page_size))
    tree.insert(InsertParams(key=RadixKey(tokens), value=torch.arange(len(tokens))))
    policy = "by sessions" if view.enable_session_radix_cache else view.radix_eviction_policy
    return f"{type(tree.tree_core).__name__}, evicts {policy}"
