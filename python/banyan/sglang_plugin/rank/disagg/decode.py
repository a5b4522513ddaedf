# SPDX-License-Identifier: Apache-2.0
"""A decode server's scheduler collects what the linker has finished.

SGLang collects where it builds prefill batches. A decode server builds none: its offloaded pages would stay locked for
ever, and fill the pool with what cannot be evicted.
"""

from __future__ import annotations

from typing import Any

from banyan.sglang_plugin import runtime


def after_process_decode_queue(result: None, scheduler: Any) -> None:
    """Runs on every rank in every iteration: the call holds a collective."""
    if runtime.is_sharing():
        scheduler.tree_cache.check_hicache_events()
