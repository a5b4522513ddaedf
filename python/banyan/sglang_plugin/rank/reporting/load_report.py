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


def after_process_input_requests(result: None, scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """Publish the load now if anything came in: to the dispatcher, and to whom SGLang publishes it besides."""
    if not recv_reqs:
        return
    config = runtime.config()
    if config is not None and config.policy != SGLANG_POLICY:
        snapshot = scheduler.publish_load_snapshot(force=True)
        scheduler.load_publisher.publish_load_stat(scheduler.load_inquirer.get_loads, force=True, snapshot=snapshot)
