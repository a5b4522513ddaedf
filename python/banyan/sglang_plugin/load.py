# SPDX-License-Identifier: Apache-2.0
"""A rank tells its load when requests have come, not only when a batch has ended.

SGLang writes its load snapshot after each batch. A prefill may take seconds, and what arrives meanwhile, or has just
been taken into the batch, would be missing from what the dispatcher reads all that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from banyan.config import SGLANG_POLICY
from banyan.sglang_plugin import runtime


def after_process_input_requests(result: None, scheduler: Any, recv_reqs: Sequence[Any]) -> None:
    """Publish the load snapshot now if anything came in."""
    if not recv_reqs:
        return
    config = runtime.config()
    if config is not None and config.policy != SGLANG_POLICY:
        scheduler.publish_load_snapshot(force=True)
