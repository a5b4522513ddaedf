# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in a rank's queue while another one brings what they begin with (``planner.pending_prompts``).

Where what they wait for never comes, they wait for ``MOST_PASSES`` passes and no more: a cache that gives none of them
the pages of another must not have them computed one after the other. The shards of a rank decide alike: all that is
asked here is SGLang's own. The scheduler's thread calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from banyan import faults
from banyan.planner.pending_prompts import LEAST_MOVED_TOKENS, LEAST_SHARED_TOKENS, PendingPrompts, Prompt

MOST_PASSES = 3
"""Without finding more of the prompt, or more of it in the pool. The results of a forward are there after two."""

_pending: PendingPrompts | None = None
_passed_over: Callable[[], None] | None = None


def wait(passed_over: Callable[[], None]) -> None:
    """From now on such requests wait. ``passed_over`` is told of each once."""
    global _pending, _passed_over
    _pending, _passed_over = PendingPrompts(), faults.quiet(passed_over, "pending.passed_over", lambda: None)


def begin_pass() -> None:
    """SGLang goes through its queue anew."""
    if _pending is not None:
        _pending.begin_pass()


def _has_to_wait(req: Any, free_tokens: Callable[[], int]) -> bool:
    """Whether the next pages of its prompt are being brought by another request: it is passed over. ``free_tokens``: of
    the pool, without evicting anything."""
    if _pending is None or (prompt := _prompt(req)) is None:
        return False
    num_found = req.prefix_len + req.host_hit_length
    found_before, cached_before, num_passes = getattr(req, "banyan_passes", (num_found, req.prefix_len, 0))
    if num_found > found_before or req.prefix_len > cached_before:
        num_passes = 0
    if num_passes == MOST_PASSES or not _are_coming(_pending, req, prompt, free_tokens):
        return False
    if _passed_over is not None and not hasattr(req, "banyan_passes"):
        _passed_over()
    req.banyan_passes = max(found_before, num_found), max(cached_before, req.prefix_len), num_passes + 1
    return True


def _are_coming(pending: PendingPrompts, req: Any, prompt: Prompt, free_tokens: Callable[[], int]) -> bool:
    num_elsewhere = req.host_hit_length
    most = req._compute_max_prefix_len(len(prompt.tokens))
    if pending.are_computed(prompt, req.prefix_len + num_elsewhere, most):
        return True
    # To move them again is mostly quicker than to wait for a forward. What it costs is room, where that has to be made.
    # With windows the pages of the other prompt do not do: it is restored where that one did not end.
    if num_elsewhere < LEAST_MOVED_TOKENS or req.swa_host_hit_length:
        return False
    if len(prompt.tokens) - req.prefix_len <= free_tokens():
        return False
    return pending.are_brought(prompt, req.prefix_len)


def _note(req: Any) -> None:
    """It has been taken into the batch that is being made, or a piece of it."""
    if _pending is None or req.skip_radix_cache_insert or (prompt := _prompt(req)) is None:
        return
    # Not the request: when it goes is the collector's choice, and not the same on all shards.
    output_ids, num_before = req.output_ids, len(req.output_ids)
    _pending.take(prompt, req.prefix_len + req.extend_len, lambda: len(output_ids) > num_before)


def _prompt(req: Any) -> Prompt | None:
    """None where its tokens do not say what its KV is or are too few, and of a streamed session, whose turns SGLang
    keeps apart from the tree."""
    if len(req.origin_input_ids) <= LEAST_SHARED_TOKENS or req.positional_embed_overrides is not None:
        return None
    if req.session is not None and req.session.streaming:
        return None
    return Prompt((req.extra_key, req.cache_salt, req.lora_id), req.origin_input_ids)


has_to_wait = faults.quiet(_has_to_wait, "pending.has_to_wait", lambda req, free_tokens: False)
note = faults.quiet(_note, "pending.note", lambda req: None)
