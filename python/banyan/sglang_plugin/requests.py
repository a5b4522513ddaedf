# SPDX-License-Identifier: Apache-2.0
"""The requests of this rank by id, and what Banyan knows about each of their prefixes.

The linker contract passes request ids. The registry holds requests weakly: a finished request is forgotten by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from banyan.core import PrefixSpan
from banyan.routing import hint
from banyan.routing.hint import PrefixHint
from banyan.sglang_plugin import runtime

_by_rid: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def after_create_generation_req(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """Give every request the three fields of the design; the dispatcher's hint is their first value."""
    if not runtime.is_sharing():
        return
    seen = _hint_of(req.kv_hints)
    req.dp_origin_kv_len = 0
    req.dp_max_kv_len = seen.max_tokens if seen is not None else 0
    req.dp_max_kv_rank = seen.max_rank if seen is not None else -1
    req.banyan_peer_tokens = 0
    _by_rid[req.rid] = req


def before_flush_after_weight_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    """The weights of this rank have changed: its pages so far belong to the old ones."""
    if not runtime.is_sharing():
        return
    from banyan.sglang_plugin import linker

    linker.installed().weights_changed()


def record_span(rid: str, span: PrefixSpan) -> None:
    """Note what the rank itself saw; it replaces the dispatcher's hint."""
    req = _by_rid.get(rid)
    if req is not None:
        req.dp_origin_kv_len = span.origin_tokens
        req.dp_max_kv_len = span.max_tokens
        req.dp_max_kv_rank = span.max_rank


def record_fetch(rid: str, num_tokens: int) -> None:
    """Note how many tokens of the request come from a peer."""
    req = _by_rid.get(rid)
    if req is not None:
        req.banyan_peer_tokens = num_tokens


def num_prompt_pages(rid: str, page_tokens: int) -> int | None:
    """Pages that SGLang may take from a cache for this request: all but the last token; None when it is unknown."""
    req = _by_rid.get(rid)
    if req is None:
        return None
    return max(len(req.full_untruncated_fill_ids) - 1, 0) // page_tokens


def _hint_of(envelope: Any) -> PrefixHint | None:
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == hint.ACTION_TYPE and action.action_version == hint.ACTION_VERSION:
            return PrefixHint.from_payload(action.payload)
    return None
