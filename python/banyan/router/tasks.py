# SPDX-License-Identifier: Apache-2.0
"""What the router does beside requests: probes and subscriptions, none of which may end unnoticed.

Invariants
  1. Work that ends by a fault is named in the log, once for each name, counted, and begun again after ``PAUSE_S``.
  2. Before it is begun again, what it had learnt is given up (``lost``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("banyan.router")

PAUSE_S = 1.0

Work = Callable[[], Coroutine[Any, Any, None]]


class Tasks:
    """Those of one router. ``count``: told the name of each that has ended by a fault."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()

    def start(self, name: str, work: Work, lost: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
        """Keep ``work`` going until its task, or all of them, are cancelled."""
        task = asyncio.get_running_loop().create_task(self._keep_going(name, work, lost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_going(self, name: str, work: Work, lost: Callable[[], None]) -> None:
        while True:
            try:
                await work()
                return
            except Exception:
                self._count(name)
                if name not in self._said:
                    self._said.add(name)
                    logger.exception(
                        "%s has ended by a fault and begins again (more are only counted: "
                        "banyan_router_tasks_ended_total)",
                        name,
                    )
                lost()
            await asyncio.sleep(PAUSE_S)
