# SPDX-License-Identifier: Apache-2.0
"""Page numbers on their way to the device, by way of memory that was pinned at the start.

An ordinary upload waits for its stream, and memory that is pinned for one is pinned under the driver's locks, by the
thread that schedules.

Invariant: numbers on their way are not written over before the event behind them is done.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable

from banyan.transport.cuda_ipc.copies import EventPool
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.places import WORD_BYTES
from banyan.transport.cuda_ipc.ring_space import RingSpace


class NumbersToDevice:
    """Lists of numbers, in the order of the calling thread's stream. One thread."""

    def __init__(self, driver: CudaDriver, *, current_stream: Callable[[], int], num_pages: int) -> None:
        """``num_pages`` may be on their way at once."""
        self._driver = driver
        self._current_stream = current_stream
        self._room = RingSpace(num_pages)
        self._pinned = driver.allocate_pinned(self._room.size * WORD_BYTES)
        self._events = EventPool(driver, driver.create_event)
        self._sent: deque[int] = deque()

    def send(self, numbers: bytes, target: int) -> bool:
        """Bring int64 numbers to ``target`` in the device's memory; False when too many are on their way.

        Raises:
            DriverError: when the driver refuses.
        """
        while self._sent and self._driver.is_event_done(self._sent[0]):
            self._events.give([self._sent.popleft()])
            self._room.give_back()
        if not self._room.has_room(len(numbers) // WORD_BYTES):
            return False
        staged = self._pinned + self._room.take(len(numbers) // WORD_BYTES) * WORD_BYTES
        ctypes.memmove(staged, numbers, len(numbers))
        stream, event = self._current_stream(), self._events.take()
        self._driver.copy_async(target, staged, len(numbers), stream)
        self._driver.record_event(event, stream)
        self._sent.append(event)
        return True
