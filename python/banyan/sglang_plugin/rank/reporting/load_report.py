# SPDX-License-Identifier: Apache-2.0
"""A rank tells its load when requests have come, not only when a batch has ended.

SGLang tells its load after each batch. A prefill may take seconds, and what arrives meanwhile, or has just been taken
into the batch, would be missing all that time from what the dispatcher reads, and a router hears.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from banyan.config import SGLANG_POLICY
from banyan.sglang_plugin import runtime

LEAST_TOKENS = 256
"""What comes to the only rank of a server is told by itself from here on; less is told with its batch. Of several ranks
the dispatcher needs all: it is by what was received and not answered that a rank is found to stand still."""

LEAST_PERIOD_S = 0.005
"""To tell takes as long as the queue is, and requests may come in each step of a forward of milliseconds."""

_is_owed = False
_may_tell_s = 0.0


def _num_tokens(received: Any) -> int:
    """Of a request or a batch of them; 0 of a command, ``LEAST_TOKENS`` where it does not say."""
    tokens = getattr(received, "input_ids", () if getattr(received, "batch", None) is None else None)
    return LEAST_TOKENS if tokens is None else len(tokens)


def after_process_input_requests(result: None, scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """Publish the load if what came in is worth it, now or in a step soon after: to the dispatcher, and to whom SGLang
    publishes it besides. SGLang calls in each step, also where nothing has come and nothing is computed."""
    global _is_owed, _may_tell_s
    _is_owed = _is_owed or _is_worth_it(scheduler, recv_reqs)
    if not _is_owed or (now_s := time.monotonic()) < _may_tell_s:
        return
    _is_owed, _may_tell_s = False, now_s + LEAST_PERIOD_S
    snapshot = scheduler.publish_load_snapshot(force=True)
    scheduler.load_publisher.publish_load_stat(scheduler.load_inquirer.get_loads, force=True, snapshot=snapshot)


def _is_worth_it(scheduler: Any, recv_reqs: Sequence[Any]) -> bool:
    if not recv_reqs:
        return False
    if scheduler.server_args.dp_size == 1 and sum(map(_num_tokens, recv_reqs)) < LEAST_TOKENS:
        return False
    config = runtime.config()
    return config is not None and config.policy != SGLANG_POLICY
