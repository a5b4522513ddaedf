# SPDX-License-Identifier: Apache-2.0
"""A read that shows whether a peer's memory can be believed.

Some machines (PCIe switches with access control, an IOMMU in the way) say that GPUs reach each other and then deliver
other bytes. So each rank holds some that follow from a number it announces, and a peer reads them once, with the kernel
that will read pages, before it looks for pages there.

Invariant: one reading is under way at a time; its room is not used for another before ``matches``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from array import array

from banyan.transport.cuda_ipc.copies import PageKernel, PageLists
from banyan.transport.cuda_ipc.description import NONCE_BYTES
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.places import WORD_BYTES, PlaceTable

NUM_LISTS = 3
NUM_PROBE_ROWS = 2


SHARED_BYTES = 2 << 20
"""A handle opens memory in blocks of this size. What is smaller lies in one with other allocations of its process."""


def pattern(nonce: bytes, num_bytes: int) -> bytes:
    """What the memory behind ``nonce`` holds."""
    return hashlib.shake_256(nonce).digest(num_bytes)


class OwnProbe:
    """What peers read of this rank."""

    def __init__(self, driver: CudaDriver, *, stream: int, num_bytes: int) -> None:
        """The bytes are there when ``stream`` has come so far: announce them afterwards."""
        self.nonce = os.urandom(NONCE_BYTES)
        self.num_bytes = num_bytes
        self.address = driver.allocate(-(-num_bytes // SHARED_BYTES) * SHARED_BYTES)
        self._staging = driver.allocate_pinned(num_bytes)
        ctypes.memmove(self._staging, pattern(self.nonce, num_bytes), num_bytes)
        driver.copy_async(self.address, self._staging, num_bytes, stream)


class ProbeReader:
    """Reads the probes of peers, one after the other. ``num_bytes`` of one: a page of the first extent."""

    def __init__(self, driver: CudaDriver, kernel: PageKernel, places: PlaceTable, *, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_busy = False
        self._driver = driver
        self._kernel = kernel
        self._places = places
        self._source, self._target = places.take_row(), places.take_row()
        self._scratch = driver.allocate(num_bytes)
        self._landed = driver.allocate_pinned(num_bytes)
        self._lists = driver.allocate(NUM_LISTS * WORD_BYTES)
        self._numbers = driver.allocate_pinned(NUM_LISTS * WORD_BYTES)

    def begin(self, address: int) -> None:
        """Enqueue the read of the probe at ``address`` on the table's stream."""
        self.is_busy = True
        places, stream = self._places, self._places.stream
        numbers = array("q", [self._source, 0, 0])
        ctypes.memmove(self._numbers, numbers.tobytes(), NUM_LISTS * WORD_BYTES)
        self._driver.copy_async(self._lists, self._numbers, NUM_LISTS * WORD_BYTES, stream)
        ctypes.memset(self._landed, 0, self.num_bytes)
        for row, base in ((self._source, address), (self._target, self._scratch)):
            places.write(row, [base] * places.num_extents, [0] * places.num_extents)
        lists = PageLists(self._lists, self._lists + WORD_BYTES, self._lists + 2 * WORD_BYTES, 1)
        self._kernel.enqueue(stream=stream, lists=lists, target_row=self._target, extents=range(1))
        self._driver.copy_async(self._landed, self._scratch, self.num_bytes, stream)

    def matches(self, nonce: bytes) -> bool:
        """Whether what was read is what the peer has. The device must have come past ``begin``."""
        self.is_busy = False
        return ctypes.string_at(self._landed, self.num_bytes) == pattern(nonce, self.num_bytes)
