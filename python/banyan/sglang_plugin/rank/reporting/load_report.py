# SPDX-License-Identifier: Apache-2.0
"""A rank tells its load when requests have come, not only when a batch has ended.

SGLang tells its load after each batch. A prefill may take seconds, and what arrives meanwhile, or has just been taken
into the batch, would be missing all that time from what the dispatcher reads, and a router hears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from banyan.config import SGLANG_POLICY
from banyan.sglang_plugin import runtime

LEAST_TOKENS = 256
"""What comes to the only rank of a server is told by itself from here on; less is told with its batch. Of several ranks
the dispatcher needs all: it is by what was received and not answered that a rank is found to stand still."""


def _num_tokens(received: Any) -> int:
    """Of a request or a batch of them; 0 of a command, ``LEAST_TOKENS`` where it does not say."""
    tokens = getattr(received, "input_ids", () if getattr(received, "batch", None) is None else None)
    return LEAST_TOKENS if tokens is None else len(tokens)


def after_process_input_requests(result: None, scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """Publish the load now if what came in is worth it: to the dispatcher, and to whom SGLang publishes it besides."""
    if not recv_reqs:
        return
    if scheduler.server_args.dp_size == 1 and sum(map(_num_tokens, recv_reqs)) < LEAST_TOKENS:
        return
    config = runtime.config()
    if config is not None and config.policy != SGLANG_POLICY:
        snapshot = scheduler.publish_load_snapshot(force=True)
        scheduler.load_publisher.publish_load_stat(scheduler.load_inquirer.get_loads, force=True, snapshot=snapshot)
