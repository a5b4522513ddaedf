# SPDX-License-Identifier: Apache-2.0
"""A decode server asks for less: what its arena has behind what its pool has is copied up here (``disagg.take_back``).

SGLang has a place for prefixes that a decode server restores by itself: what is promised in its match is not sent, and
no slots are made for it. Here the slots are made when the promise is given to the prefill server, and belong to the
request from then on, as those of the pages that are sent: SGLang frees them with the request, or its tree takes them
over with the others. So nothing of the tree is touched, and an abort has no way of its own.

States of a receiver: nothing promised -> promised -> ``send_metadata`` -> copying: a hand-over that has ended still
counts as under way -> in, or failed: then the request fails. SGLang hears of a failure from ``poll``, and frees the
pages then: the copy is waited for before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

from banyan import faults
from banyan.core import LOAD_FAILED
from banyan.features.pairs.rank import at_rank
from banyan.features.pairs.take_back import State, TakeBack, TakeBacks
from banyan.planner import Action
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import requests

FAILED = f"{LOAD_FAILED}: pages of this decode server's arena"
"""In the words that have a router's next attempt compute the prompt."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A take-back, and the request that it is for."""

    take_back: TakeBack
    req: Any
    match: Any
    queue: Any


class TakingReceiver:
    """In front of SGLang's receiver: the base of Banyan's."""

    taken: Taken | None = None
    prompt_keys: list[str] | None = None
    """Asked for again in each step in which the pool has no room for the request."""

    def send_metadata(self, *args: Any, **named: Any) -> Any:
        """SGLang has made the request's slots but for those of the promised pages, and tells the prefill server."""
        if self.taken is not None and self.taken.take_back.state is State.PROMISED:
            _begin_or_fail(self.taken)
        return super().send_metadata(*args, **named)  # type: ignore[misc]

    def poll(self) -> Any:
        state = super().poll()  # type: ignore[misc]
        if self.taken is None:
            return state
        take_back = self.taken.take_back
        if state == KVPoll.Failed:
            take_back.settle()
        elif take_back.state is State.FAILED:
            manager: Any = self.kv_mgr  # type: ignore[attr-defined]
            manager.record_failure(self.bootstrap_room, FAILED)  # type: ignore[attr-defined]
            return KVPoll.Failed
        elif take_back.state is State.COPYING and state == KVPoll.Success:
            return KVPoll.Transferring
        return state


def after_match_prefix_and_lock(match: Any, queue: Any, req: Any) -> None:
    """A request that may be let in has been matched with the pool: promise what the arena has behind that."""
    if not runtime.is_sharing():
        return
    take_backs = at_rank.installed().take_backs
    receiver = next((each.kv_receiver for each in queue.queue if each.req is req), None)
    if take_backs is None or not isinstance(receiver, TakingReceiver):
        return
    receiver.taken = None
    if match.needs_local_restore or not _may_promise(queue, req):
        return
    promised = _promise(take_backs, receiver, req, match.l1_prefix_len)
    if promised is not None:
        receiver.taken = Taken(promised, req, match, queue)
        match.l2_host_hit_length = promised.num_pages * at_rank.installed().rank.page_tokens


def _may_promise(queue: Any, req: Any) -> bool:
    # SGLang compares what was sent with what lies behind the tree's part; a streaming session keeps its slots itself.
    has_digests = queue.scheduler.kv_checksum_computer is not None
    return not has_digests and req.session is None and getattr(req, "banyan_asked", None) is not Action.COMPUTE


def _promise(take_backs: TakeBacks, receiver: TakingReceiver, req: Any, num_held_tokens: int) -> TakeBack | None:
    page_tokens = at_rank.installed().rank.page_tokens
    if num_held_tokens % page_tokens:
        return None
    if receiver.prompt_keys is None:
        receiver.prompt_keys = requests.prompt_keys(requests.id_of(req), page_tokens) or []
    return take_backs.promise(receiver.prompt_keys, num_held_tokens // page_tokens)


def _begin(taken: Taken) -> None:
    """Make the slots of the promised pages, give them to the request, and copy."""
    installed, req, match = at_rank.installed(), taken.req, taken.match
    begin, end = match.l1_prefix_len, match.decode_prefix_len
    slots = taken.queue.token_to_kv_pool_allocator.alloc(end - begin)
    if slots is None:
        taken.take_back.has_no_place()
        return
    taken.queue.req_to_token_pool.write((req.kv.req_pool_idx, slice(begin, end)), slots)
    # They are the request's own, not the tree's; and SGLang has nothing left to restore.
    req.kv.cache_protected_len = begin
    match.l2_host_hit_length = 0
    assert installed.take_backs is not None
    installed.take_backs.begin(taken.take_back, installed.rank.frames(slots))


def _fail(taken: Taken) -> None:
    """What was promised does not come."""
    taken.take_back.has_no_place()


_begin_or_fail = faults.quiet(_begin, "taking_back.begin", _fail)
"""SGLang calls this: what is raised here would end the rank."""


def collect() -> None:
    """At the end of a decode server's step: let go of promises that were not given to a prefill server, and see which
    copies have ended."""
    take_backs = at_rank.installed().take_backs
    if take_backs is not None:
        take_backs.poll()
