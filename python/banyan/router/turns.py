# SPDX-License-Identifier: Apache-2.0
"""What would hold up the loop is done beside it, one at a time: reading a large body, hashing a long prompt.

Invariants
  1. No more than one thing is done beside the loop. Who comes first has the first turn.
  2. A body whose turn has not come stays with its request: in the thread's own queue those of clients that have gone
     would stay, and count nowhere.
  3. Where ``has_room`` is asked first, bodies of no more than ``MOST_BYTES`` wait, and of one client of half of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from banyan.telemetry import one_thread

T = TypeVar("T")

MOST_BYTES = 128 << 20
"""That wait for their turn take some seconds, and nobody is refused before it has come."""


class Turns:
    """Those of one router."""

    def __init__(self) -> None:
        self._thread = one_thread("banyan-read-prompt")
        self._turn = asyncio.Lock()
        self._waiting_bytes: Counter[str] = Counter()

    def has_room(self, client: str) -> bool:
        """Whether one more of this client may wait."""
        return self._waiting_bytes.total() < MOST_BYTES and self._waiting_bytes[client] < MOST_BYTES // 2

    async def take(self, client: str, num_bytes: int, work: Callable[..., T], *args: Any) -> T:
        """What ``work`` gives when its turn has come. ``num_bytes``: of the body that it is about."""
        self._waiting_bytes[client] += num_bytes
        try:
            await self._turn.acquire()
        finally:
            self._waiting_bytes[client] -= num_bytes
            if not self._waiting_bytes[client]:
                del self._waiting_bytes[client]
        going = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        going.add_done_callback(lambda _: self._turn.release())
        # It cannot be ended, and its end is when it is another's turn.
        return await asyncio.shield(going)
