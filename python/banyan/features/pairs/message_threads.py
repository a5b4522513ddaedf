# SPDX-License-Identifier: Apache-2.0
"""What servers of the other kind are told, each by a thread of its own: one that reads nothing holds a message for half
a minute, and nobody else is to wait behind it.

Invariants
  1. To one address messages go in the order in which they came.
  2. There are no more than ``MAX_ADDRESSES`` threads: further addresses share the first.
  3. No more than ``MAX_WAITING`` wait for an address. Further ones are not told, nor any where the system has no thread
     left: their requests end by a time-out.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Any

from banyan.telemetry import start_thread

logger = logging.getLogger("banyan")

MAX_WAITING = 1024
MAX_ADDRESSES = 1024


class MessageThreads:
    """One rank's; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, queue.Queue[Callable[[], Any]]] = {}

    def tell(self, address: Hashable, say: Callable[[], Any]) -> None:
        """Call ``say`` soon, on the thread of that address. Whoever tells waits for nothing, and may hold locks."""
        try:
            self._line(address).put_nowait(say)
        except queue.Full:
            logger.warning("banyan: %d messages wait for %s: one more is not sent", MAX_WAITING, address)
        except RuntimeError as error:
            logger.warning("banyan: there is no thread to tell %s: one message is not sent: %s", address, error)

    def _line(self, address: Hashable) -> queue.Queue[Callable[[], Any]]:
        """What waits for it."""
        with self._lock:
            if len(self._waiting) >= MAX_ADDRESSES and address not in self._waiting:
                address = next(iter(self._waiting))
            if address not in self._waiting:
                waiting: queue.Queue[Callable[[], Any]] = queue.Queue(MAX_WAITING)
                start_thread(lambda: _say_all(waiting), name="banyan-tell", feature=f"telling {address}")
                self._waiting[address] = waiting
            return self._waiting[address]


def _say_all(waiting: queue.Queue[Callable[[], Any]]) -> None:
    while True:
        _say(waiting.get())


def _say(say: Callable[[], Any]) -> None:
    try:
        say()
    except Exception as error:  # noqa: BLE001 - said; the next one is told
        logger.warning("banyan: a server of the other kind could not be told: %r", error)
