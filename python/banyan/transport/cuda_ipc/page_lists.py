# SPDX-License-Identifier: Apache-2.0
"""Which pages a batch copies, in the memory of the device: brought there on the copy stream.

Invariant: the room of a batch, here and in pinned memory, is not written again until ``give_back``. Rooms are given
back in the order in which they were taken.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.ports import Frames
from banyan.transport.cuda_ipc.copies import DeviceFrames, PageLists
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.places import WORD_BYTES
from banyan.transport.cuda_ipc.ring_space import RingSpace

NUM_LISTS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one load: ``(row, pages as bytes of int64)`` where they come from, and the pages that they go to."""

    rows: list[tuple[int, bytes]]
    targets: Frames | DeviceFrames

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for _, pages in self.rows) // WORD_BYTES

    @property
    def is_on_device(self) -> bool:
        """Whether ``targets`` lie there."""
        return hasattr(self.targets, "data_ptr")

    @property
    def num_targets(self) -> int:
        return self.targets.numel() if self.is_on_device else len(self.targets)


class ListSpace:
    """Room for the lists of ``num_pages`` under way at once."""

    def __init__(self, driver: CudaDriver, *, stream: int, num_pages: int) -> None:
        self._driver = driver
        self._stream = stream
        self._room = RingSpace(num_pages)
        num_bytes = NUM_LISTS * self._room.size * WORD_BYTES
        self._lists = driver.allocate(num_bytes)
        self._staging = driver.allocate_pinned(num_bytes)

    def has_room(self, num_pages: int) -> bool:
        return self._room.has_room(num_pages)

    def take(self, num_pages: int) -> PageLists:
        """Room for a batch.

        Raises:
            ValueError: when there is none; see ``has_room``.
        """
        start = self._lists + NUM_LISTS * WORD_BYTES * self._room.take(num_pages)
        size = num_pages * WORD_BYTES
        return PageLists(rows=start, sources=start + size, targets=start + 2 * size, num_pages=num_pages)

    def upload(self, lists: PageLists, parts: Sequence[Part]) -> None:
        """Bring rows and source pages from here, target pages from where SGLang has them: here or on the device.

        Raises:
            DriverError: when the driver refuses.
        """
        rows, sources = array("q"), array("q")
        address = lists.targets
        for part in parts:
            for row, pages in part.rows:
                sources.frombytes(pages)
                rows.extend([row] * (len(sources) - len(rows)))
            if part.is_on_device:
                num_bytes = part.targets.numel() * WORD_BYTES
                self._driver.copy_async(address, part.targets.data_ptr(), num_bytes, self._stream)
            else:
                num_bytes = self._stage(address, bytes(memoryview(part.targets).cast("B")))
            address += num_bytes
        self._stage(lists.rows, (rows + sources).tobytes())

    def give_back(self) -> None:
        """The oldest batch has landed."""
        self._room.give_back()

    def close(self) -> None:
        self._driver.free(self._lists)
        self._driver.free_pinned(self._staging)

    def _stage(self, address: int, numbers: bytes) -> int:
        """Bring numbers to ``address``, by way of pinned memory; their size in bytes."""
        staging = self._staging + (address - self._lists)
        ctypes.memmove(staging, numbers, len(numbers))
        self._driver.copy_async(address, staging, len(numbers), self._stream)
        return len(numbers)
