# SPDX-License-Identifier: Apache-2.0
"""The requests of this rank by id, and what Banyan knows about each of their prefixes.

The linker contract passes request ids. The registry holds requests weakly: a finished request is forgotten by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from banyan import _native
from banyan.core import PrefixSpan
from banyan.planner import Action, asked
from banyan.routing import hint
from banyan.routing.hint import Decision, PrefixHint
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.detours import Until, is_prefill
from banyan.sglang_plugin.kv_hints import payload_of
from banyan.sglang_plugin.page_hash import namespace_seed
from banyan.telemetry import Counters

NUM_REMEMBERED_CHUNKS = 4096
"""Of 32 pages each: at 16 tokens a page 2 M tokens of prompts."""

_page_keys: _native.PageKeys | None = None
_by_rid: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_counters = Counters()
"""Where placements are counted; the linker's as soon as there is one."""


def count_into(counters: Counters) -> None:
    """Count from now on which requests came here, and why."""
    global _counters
    _counters = counters


def after_create_generation_req(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """Give every request the three fields of the design; the dispatcher's hint is their first value."""
    if not runtime.is_sharing():
        return
    seen = _hint_of(req.kv_hints)
    req.dp_origin_kv_len = 0
    req.dp_max_kv_len = seen.max_tokens if seen is not None else 0
    req.dp_max_kv_rank = seen.max_rank if seen is not None else -1
    req.banyan_tokens = {}
    req.banyan_asked = _asked_of(req.kv_hints)
    _by_rid[req.rid] = req
    from banyan.sglang_plugin import linker

    linker.installed().arrive(req.rid)
    req.banyan_decision = seen.decision if seen is not None else None
    if is_prefill(req.kv_hints):
        # Another rank answers: SGLang takes the one token of this prefill for delivered.
        req.finished_output = True
        _counters.detours += 1
    else:
        _count_placement(req.banyan_decision, is_pinned=recv_req.routed_dp_rank is not None)


def _count_placement(decision: Decision | None, *, is_pinned: bool) -> None:
    if decision is None:
        _counters.placed_pinned += is_pinned
        _counters.placed_sglang += not is_pinned
        return
    _counters.count_placed(decision.reason)
    _counters.placed_hot_avoided += decision.num_hot_ranks > 0
    _counters.dispatch_us += decision.dispatch_us
    _counters.detour_us += decision.held_us
    _counters.detours_late += decision.held_until not in ("", Until.LANDED)


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


def record_fetch(rid: str, tokens_by_tier: dict[str, int]) -> None:
    """Note how many tokens of the request come from where: peer, host, storage."""
    req = _by_rid.get(rid)
    if req is not None:
        req.banyan_tokens = tokens_by_tier


def prompt_keys(rid: str, page_tokens: int) -> list[str] | None:
    """The keys of all pages that a cache may supply for this request; None when it has none that Banyan could know."""
    req = _by_rid.get(rid)
    return None if req is None else _keys(req, req.origin_input_ids[:-1], page_tokens)


def grown_chains(page_tokens: int) -> Iterator[list[str]]:
    """The keys of all pages, answers included, of every request that has answered a token."""
    for req in list(_by_rid.values()):
        if req.output_ids:
            keys = _keys(req, [*req.origin_input_ids, *req.output_ids], page_tokens)
            if keys is not None:
                yield keys


def _keys(req: Any, tokens: Sequence[int], page_tokens: int) -> list[str] | None:
    global _page_keys
    if _page_keys is None:
        _page_keys = _native.PageKeys(page_tokens, NUM_REMEMBERED_CHUNKS)
    seed = namespace_seed(req.extra_key, req.cache_salt)
    try:
        return _page_keys.of(seed, np.asarray(tokens, dtype=np.int64))
    except ValueError:
        # Image placeholders: such pages have keys of another kind.
        return None


def num_prompt_tokens(rid: str) -> int | None:
    """Tokens of the prompt, and of the answer so far when it is computed again; None when the request is unknown."""
    req = _by_rid.get(rid)
    return None if req is None else len(req.full_untruncated_fill_ids)


def asked_action(rid: str) -> Action | None:
    """What the request asked to be done with its tail, if it did."""
    req = _by_rid.get(rid)
    return None if req is None else req.banyan_asked


def _hint_of(hints: Any) -> PrefixHint | None:
    payload = payload_of(hints, hint.ACTION_TYPE, hint.ACTION_VERSION)
    return None if payload is None else PrefixHint.from_payload(payload)


def _asked_of(hints: Any) -> Action | None:
    payload = payload_of(hints, asked.ACTION_TYPE, asked.ACTION_VERSION)
    return None if payload is None else asked.from_payload(payload)
