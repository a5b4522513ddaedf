# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler calls: a request has come, its prefix is looked for, an embedding forward begins, the
cache is to be flushed."""

from __future__ import annotations

import functools
import logging
from typing import Any

from banyan.planner import Action, asked
from banyan.routing import hint
from banyan.routing.hint import Decision, PrefixHint, Until
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.kv_hints import payload_of, session_of
from banyan.sglang_plugin.rank import linker, requests
from banyan.sglang_plugin.rank.reporting import spans
from banyan.telemetry import Counters

logger = logging.getLogger("banyan")

_SEES_WITHIN_IMAGES = frozenset(f"{name}ForConditionalGeneration" for name in ("Gemma3", "Gemma4", "Gemma4Unified"))


def after_create_generation_req(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """Give every request the three fields of the design; the dispatcher's hint is their first value."""
    if runtime.config() is None:
        return
    # Where nothing is shared as well: of those that are known an abort ends only whom it means (``whole_ids``).
    requests.register(req)
    if not runtime.is_sharing():
        return
    seen = _hint_of(req.kv_hints)
    _introduce(req, seen, _asked_of(req.kv_hints))
    # SGLang gives the request its tokenizer only later.
    req.banyan_session, req.banyan_tokenizer = session_of(recv_req), getattr(scheduler, "tokenizer", None)
    if recv_req.mm_inputs is None:
        _arrive(req)
    spans.placed(req, req.banyan_decision)
    _count_placement(linker.installed().counters, req.banyan_decision, is_pinned=recv_req.routed_dp_rank is not None)


def before_add_request_to_queue(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A request is queued, once or more often. One of an embedding or reward model SGLang makes in another place, and
    nobody hints at its prefix. Of one with an image, a video or a sound the tokens are known since it was made.
    """
    if runtime.config() is None:
        return
    is_new = not requests.is_known(req)
    if is_new:
        requests.register(req)
    if not runtime.is_sharing():
        return
    if is_new:
        _introduce(req, None, None)
    if not req.banyan_has_arrived:
        _arrive(req)
    if req.multimodal_inputs is not None and (why := _depends_on_more(scheduler, req)) is not None:
        _say_once(why)
        # SGLang's own: it is computed and answered, and leaves nothing behind.
        req.skip_radix_cache_insert = True


def _depends_on_more(scheduler: Any, req: Any) -> str | None:
    """On what else than its tokens the KV of a request with media depends, if on anything."""
    if req.session is not None:
        # Also where ``offset`` has cut these away.
        return "a session's turn is computed at the positions of the media of the turns before"
    if found := sorted(_SEES_WITHIN_IMAGES & set(scheduler.model_config.hf_config.architectures or ())):
        return f"{found[0]} attends within an image where the whole of it is computed at once"
    return None


@functools.cache
def _say_once(why: str) -> None:
    logger.warning("banyan: %s: such requests share nothing", why)


def before_match(wrapper: Any, key: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A request's prefix is looked for, maybe again: what was found before is nothing to it. SGLang forgets that where
    it loads or aborts, and not where it finds nothing or the rank's own tree has all."""
    if not runtime.is_sharing():
        return
    wrapper.hit_markers.pop(req.rid, None)
    # Policies that order by what is cached look at whole prompts: no further than when the request's turn comes, or
    # each of the two looks is forgotten for the other, and reads are begun for pages that nobody is going to ask for.
    most = req._compute_max_prefix_len(len(key.token_ids))
    key.limit = most if key.limit is None else min(key.limit, most)


def before_forward_batch_embedding(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """An embedding forward begins: its layers are to wait for the pages of its batch, as those of any other."""
    if runtime.is_sharing():
        worker.set_hicache_consumer(batch.hicache_consumer_index)


def after_flush_handled(answer: Any, *args: Any, **kwargs: Any) -> None:
    """A flush has been asked for. A rank that refuses it, or puts it off, keeps the pages that it has to itself until
    SGLang offers them again: others have flushed theirs, and would fetch them again."""
    if runtime.is_sharing() and (answer is None or not answer.success):
        linker.installed().withdraw()


def _introduce(req: Any, seen: PrefixHint | None, wanted: Action | None) -> None:
    req.dp_origin_kv_len = 0
    req.dp_max_kv_len = seen.max_tokens if seen is not None else 0
    req.dp_max_kv_rank = seen.max_rank if seen is not None else -1
    req.banyan_tokens = {}
    req.banyan_asked = wanted
    req.banyan_decision = seen.decision if seen is not None else None
    req.banyan_has_arrived = False


def _arrive(req: Any) -> None:
    """Its tokens are those that SGLang's cache will have."""
    req.banyan_has_arrived = True
    linker.installed().arrive(requests.id_of(req))


def _count_placement(counters: Counters, decision: Decision | None, *, is_pinned: bool) -> None:
    if decision is None:
        counters.placed_pinned += is_pinned
        counters.placed_sglang += not is_pinned
        return
    counters.count_placed(decision.reason)
    counters.placed_hot_avoided += decision.num_hot_ranks > 0
    counters.dispatch_us += decision.dispatch_us
    counters.held_us += decision.held_us
    counters.held_in_vain += decision.held_until not in ("", Until.LANDED)


def _hint_of(hints: Any) -> PrefixHint | None:
    payload = payload_of(hints, hint.ACTION_TYPE)
    return None if payload is None else PrefixHint.from_payload(payload)


def _asked_of(hints: Any) -> Action | None:
    payload = payload_of(hints, asked.ACTION_TYPE)
    return None if payload is None else asked.from_payload(payload)
