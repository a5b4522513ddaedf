# SPDX-License-Identifier: Apache-2.0
"""A decode server says which beginning of a prompt it has. Nothing can be sent behind one that is longer than the
prompt: SGLang would never end such a request."""

from __future__ import annotations

import logging
from typing import Any

from banyan.features.pairs.rank.hand_over import HandOver

logger = logging.getLogger("banyan")


def before_finalize_bootstrap(queue: Any, req: Any) -> None:
    """All decode ranks of the request have asked, and its pages are about to be counted."""
    sender = req.disagg_kv_sender
    manager: Any = getattr(sender, "kv_mgr", None)
    if not isinstance(manager, HandOver):
        return
    prefixes = manager.req_to_decode_prefix_len  # type: ignore[attr-defined]
    num_said, num_tokens = prefixes.get(sender.bootstrap_room, 0), len(req.origin_input_ids)
    if num_said > num_tokens:
        logger.error("banyan: a decode server says that it has %d tokens of a prompt of %d", num_said, num_tokens)
        prefixes.pop(sender.bootstrap_room)
        sender.abort()
