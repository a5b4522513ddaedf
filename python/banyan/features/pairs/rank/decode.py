# SPDX-License-Identifier: Apache-2.0
"""A decode server's scheduler collects what linker and take-backs have finished, and on a CPU pauses while it waits.

SGLang collects where it builds prefill batches. A decode server builds none: its offloaded pages would stay locked for
ever, and fill the pool with what cannot be evicted.
"""

from __future__ import annotations

from typing import Any

from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.rank import taking_back
from banyan.sglang_plugin import runtime

_pauses = Pauses()


def after_process_decode_queue(result: None, scheduler: Any) -> None:
    """Runs on every rank in every iteration: the call holds a collective."""
    if not runtime.is_sharing():
        return
    scheduler.tree_cache.check_hicache_events()
    taking_back.collect()
    if not runtime.is_on_gpu():
        # What has been handed over is in the one, what is being answered in the other.
        _pauses.between_steps(has_work=bool(scheduler.waiting_queue) or not scheduler.running_batch.is_empty())
