# SPDX-License-Identifier: Apache-2.0
"""Page numbers that only the GPU knows yet, on their way to the host.

SGLang keeps page numbers on the device. To publish or to withdraw a page its number is needed here, and asking for it
would stall the scheduler until the forward pass in flight ends. So they are copied into pinned memory behind the
events that matter, and taken when they have come.

Invariants
  1. Numbers are taken in the order in which they were sent.
  2. When a number is taken, everything before the events that it was sent behind is done on the device.
  3. No page is wanted from one lane twice. A lane that is flushed may hold each once more: it has room for twice all.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from banyan.transport.cuda_ipc.copies import DeviceFrames, EventPool
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.places import WORD_BYTES
from banyan.transport.cuda_ipc.ring_space import RingSpace

Tag = TypeVar("Tag")


@dataclass(slots=True)
class _Sent(Generic[Tag]):
    tag: Tag
    frames: DeviceFrames
    offset: int
    event: int
    is_wanted: bool = True


class ReadbackLane(Generic[Tag]):
    """Lists of page numbers, first in, first out. One thread; lanes may share a stream."""

    def __init__(self, driver: CudaDriver, *, stream: int, num_pages: int) -> None:
        """``num_pages`` exist in the pool."""
        self._driver = driver
        self._stream = stream
        self._room = RingSpace(2 * num_pages)
        self._pinned = driver.allocate_pinned(self._room.size * WORD_BYTES)
        self._events = EventPool(driver, driver.create_event)
        self._sent: deque[_Sent[Tag]] = deque()
        self._num_wanted = 0

    @property
    def num_pages(self) -> int:
        """Pages whose numbers will be taken."""
        return self._num_wanted

    def tags(self) -> list[Tag]:
        """Of the lists that will be taken, in order."""
        return [sent.tag for sent in self._sent if sent.is_wanted]

    def send(self, tag: Tag, frames: DeviceFrames, *, behind: Sequence[int]) -> None:
        """Send numbers once the events ``behind`` are done. The lane keeps ``frames`` alive, and nobody writes to it.

        Raises:
            DriverError: when the driver refuses; the numbers will not come.
            ValueError: when more pages are under way than exist.
        """
        for event in behind:
            self._driver.wait_event(self._stream, event)
        num_bytes = frames.numel() * WORD_BYTES
        offset = self._room.take(frames.numel())
        try:
            self._driver.copy_async(self._pinned + offset * WORD_BYTES, frames.data_ptr(), num_bytes, self._stream)
        except BaseException:
            self._room.take_back()
            raise
        event = self._events.take()
        self._driver.record_event(event, self._stream)
        self._sent.append(_Sent(tag, frames, offset, event))
        self._num_wanted += frames.numel()

    def take(self) -> tuple[Tag, bytes] | None:
        """The next list that has come, as bytes of int64; None when it has not."""
        while self._sent and self._driver.is_event_done(self._sent[0].event):
            sent = self._sent.popleft()
            num_bytes = sent.frames.numel() * WORD_BYTES
            numbers = ctypes.string_at(self._pinned + sent.offset * WORD_BYTES, num_bytes)
            self._events.give([sent.event])
            self._room.give_back()
            if sent.is_wanted:
                self._num_wanted -= sent.frames.numel()
                return sent.tag, numbers
        return None

    def forget(self) -> int:
        """What is under way will not be taken; its room is free once it has come. The number of lists forgotten."""
        num_forgotten = 0
        for sent in self._sent:
            num_forgotten += sent.is_wanted
            sent.is_wanted = False
        self._num_wanted = 0
        return num_forgotten
