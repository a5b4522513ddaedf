# SPDX-License-Identifier: Apache-2.0
"""SGLang's orders by what is cached (``--schedule-policy``), with a bound on how long they pass a prompt over.

``hrrn`` has a bound of its own, and orders that do not look at caches pass nobody over for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from banyan.pacing.bounded_order import Queue
from banyan.sglang_plugin import runtime

BOUNDED = frozenset({"lpm", "dfs-weight", "shortest-prefill-first"})


def around_calc_priority(
    original: Callable[..., None], policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any
) -> None:
    """SGLang's order, but for what may not pass a prompt any more: that has been passed by as much as it computes."""
    if runtime.config() is None or policy.policy.value not in BOUNDED:
        original(policy, waiting_queue, *args, **kwargs)
        return
    queue: Queue | None = getattr(policy, "banyan_queue", None)
    if queue is None:
        queue = policy.banyan_queue = Queue(_num_tokens)
    # As they came: what is new stands at the end.
    queue.come(waiting_queue)
    original(policy, waiting_queue, *args, **kwargs)
    if len(waiting_queue) > 1:
        waiting_queue[:] = queue.order(waiting_queue)


def _num_tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids) - int(req.num_matched_prefix_tokens)
