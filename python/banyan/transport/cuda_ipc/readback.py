# SPDX-License-Identifier: Apache-2.0
"""Page numbers that only the GPU knows yet, on their way to the host.

SGLang keeps page numbers on the device. To publish or to withdraw a page its number is needed here, and asking for it
would stall the scheduler until the forward pass in flight ends. So they are copied into pinned memory behind the
events that matter, and taken when they have come.

Invariants
  1. Numbers are taken in the order in which they were sent.
  2. When a number is taken, everything before the events that it was sent behind is done on the device.
  3. No page is in one lane twice, so a lane for all pages never runs short.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from banyan.transport.cuda_ipc.copies import DeviceFrames, EventPool
from banyan.transport.cuda_ipc.driver import CopyDriver
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
    """Lists of page numbers, first in, first out. One thread; the stream is the lane's own."""

    def __init__(self, driver: CopyDriver, *, stream: int, num_pages: int) -> None:
        self._driver = driver
        self._stream = stream
        self._room = RingSpace(num_pages)
        self._pinned = driver.allocate_pinned(self._room.size * WORD_BYTES)
        self._events = EventPool(driver)
        self._sent: deque[_Sent[Tag]] = deque()

    @property
    def num_pages(self) -> int:
        """Pages whose numbers have not been taken."""
        return self._room.num_taken

    def frames(self) -> list[DeviceFrames]:
        """The lists on their way, as they were sent."""
        return [sent.frames for sent in self._sent]

    def send(self, tag: Tag, frames: DeviceFrames, *, behind: Sequence[int]) -> None:
        """Send numbers once the events ``behind`` are done. The lane keeps ``frames`` alive.

        Raises:
            DriverError: when the driver refuses; the numbers will not come.
            ValueError: when more pages are under way than exist.
        """
        for event in behind:
            self._driver.wait_event(self._stream, event)
        num_bytes = frames.numel() * WORD_BYTES
        offset = self._room.take(frames.numel())
        self._driver.copy_async(self._pinned + offset * WORD_BYTES, frames.data_ptr(), num_bytes, self._stream)
        event = self._events.take()
        self._driver.record_event(event, self._stream)
        self._sent.append(_Sent(tag, frames, offset, event))

    def take(self) -> tuple[Tag, bytes] | None:
        """The next list that has come, as bytes of int64; None when it has not."""
        while self._sent and self._driver.is_event_done(self._sent[0].event):
            sent = self._sent.popleft()
            num_bytes = sent.frames.numel() * WORD_BYTES
            numbers = ctypes.string_at(self._pinned + sent.offset * WORD_BYTES, num_bytes)
            self._events.give([sent.event])
            self._room.give_back()
            if sent.is_wanted:
                return sent.tag, numbers
        return None

    def forget(self) -> None:
        """What is under way will not be taken; its room is free once it has come."""
        for sent in self._sent:
            sent.is_wanted = False
