# SPDX-License-Identifier: Apache-2.0
"""A prefill server's scheduler says which pages the next forward completes, so that they can leave by layers; where
there is none it pauses, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.mem_cache.common import kv_to_page_indices

from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import at_rank
from banyan.features.pairs.rank.layerwise import LayerwiseSender
from banyan.sglang_plugin import runtime

_pauses = Pauses()


def after_get_next_disagg_prefill_batch_to_run(plan: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    # On a GPU a layer is not complete when its successor is launched: chunks leave as SGLang sends them.
    if not runtime.is_sharing() or runtime.is_on_gpu():
        return
    batch = plan.batch_to_run
    _pauses.between_steps(has_work=batch is not None)
    if batch is None:
        return
    installed = at_rank.installed()
    listeners = (_listener(req, scheduler, installed.rank.num_layers) for req in batch.reqs)
    installed.forwards.announce([listener for listener in listeners if listener is not None])


def _listener(req: Any, scheduler: Any, num_layers: int) -> Callable[[int], None] | None:
    """What is to hear of the layers of this request; None where its pages leave with their chunk only."""
    sender = req.disagg_kv_sender
    manager: Any = getattr(sender, "kv_mgr", None)
    # SGLang's own health checks have a sender of another kind.
    is_ours = isinstance(manager, LayerwiseSender) and hasattr(sender, "advanced_tokens")
    if req.pending_bootstrap or not is_ours or not manager.knows_layers(num_layers):
        return None
    allocator = scheduler.token_to_kv_pool_allocator
    begin, end = _tokens_to_send(req, sender.advanced_tokens, allocator.page_size)
    if begin >= end:
        return None
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, begin:end]
    pages = kv_to_page_indices(allocator.translate_kv_indices_for_transfer(slots), allocator.page_size)
    first = (begin - req.disagg_decode_prefix_len) // allocator.page_size
    ahead = manager.begin_advance(sender.bootstrap_room, pages, first)
    if ahead is None:
        return None
    sender.advanced_tokens = end
    return partial(manager.layers_completed, sender.bootstrap_room, ahead)


def _tokens_to_send(req: Any, advanced_tokens: int, page_tokens: int) -> tuple[int, int]:
    """From where to where the next forward completes tokens that no earlier one has announced. SGLang sends the last
    page, if it is not full, with the last chunk."""
    num_tokens = len(req.origin_input_ids)
    end = min(req.extend_end, num_tokens)
    if end < num_tokens:
        end -= end % page_tokens
    return max(req.start_send_idx, advanced_tokens), end
