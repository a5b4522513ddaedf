# SPDX-License-Identifier: Apache-2.0
"""Whose pages SGLang's tree offers: its linker is told of the pages alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from banyan.features.tenant_share.tenant_owners import TenantOwners
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.points import Points

_owners: TenantOwners | None = None


def register(points: Points) -> None:
    global _owners
    config = runtime.config()
    share = None if config is None else config.tenant_share
    _owners = None if share is None else TenantOwners(share)
    if _owners is not None:
        points.owners = _owners


def around_offload_node(offload_node: Callable[..., Any], wrapper: Any, node_id: Any, transfers: Any) -> Any:
    """A node's pages are offered; the tree knows with which salt."""
    if _owners is None:
        return offload_node(wrapper, node_id, transfers)
    _extra_key, cache_salt = wrapper.cache.tree_core.prefetch_anchor_info(node_id)
    with _owners.entering(cache_salt):
        return offload_node(wrapper, node_id, transfers)
