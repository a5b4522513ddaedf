# SPDX-License-Identifier: Apache-2.0
"""A decode server's scheduler collects what linker and take-backs have finished, ends what waits in vain for a prefill
server, and on a CPU pauses while it waits.

SGLang collects where it builds prefill batches. A decode server builds none: its offloaded pages would stay locked for
ever, and fill the pool with what cannot be evicted.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll

from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import taking_back
from banyan.sglang_plugin import runtime

UNCLAIMED = "no rank of the prefill server has said that it has this request"

_pauses = Pauses()
_pending_since_s: dict[int, float] = {}
"""Of the rooms of requests that no rank of a prefill server has said to have."""


def after_process_decode_queue(result: None, scheduler: Any) -> None:
    """Runs on every rank in every iteration: the call holds a collective."""
    if not runtime.is_sharing():
        return
    scheduler.tree_cache.check_hicache_events()
    taking_back.collect()
    _end_unclaimed(scheduler.disagg_decode_prealloc_queue.pending_reqs, time.monotonic())
    if not runtime.is_on_gpu():
        # What has been handed over is in the one, what is being answered in the other.
        _pauses.between_steps(has_work=bool(scheduler.waiting_queue) or not scheduler.running_batch.is_empty())


def _end_unclaimed(pending: list[Any], now_s: float) -> None:
    """A prefill server that refuses a request before its scheduler has it tells nobody, and of several replicas each
    may be the one: in SGLang such a request waits until its client leaves. What one shard ends, all do."""
    receivers = {each.req.bootstrap_room: each.kv_receiver for each in pending if each.kv_receiver is not None}
    for room in _pending_since_s.keys() - receivers:
        del _pending_since_s[room]
    for room, receiver in receivers.items():
        waited_s = now_s - _pending_since_s.setdefault(room, now_s)
        if waited_s > receiver.kv_mgr.waiting_timeout and receiver.conclude_state != KVPoll.Failed:
            receiver.abort()
            receiver.kv_mgr.record_failure(room, UNCLAIMED)
