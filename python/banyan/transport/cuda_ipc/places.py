# SPDX-License-Identifier: Apache-2.0
"""Where a kernel finds the pools: one row of addresses and strides for each, in the memory of the device.

Invariants
  1. Row ``OWN_ROW`` is this rank's pool, row ``ARENA_ROW`` the host arena, the others belong to peers.
  2. A row changes only on the copy stream, and only while no copy that uses it is enqueued or running.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from banyan.transport.cuda_ipc.driver import CudaDriver

OWN_ROW = 0
ARENA_ROW = 1
FIRST_PEER_ROW = 2

WORD_BYTES = 8


class PlaceTable:
    """Rows of ``(base address, stride in bytes)`` for each of ``num_extents``; int64, bases first."""

    def __init__(self, driver: CudaDriver, *, stream: int, num_peers: int, num_extents: int) -> None:
        self._driver = driver
        self.stream = stream
        self.num_extents = num_extents
        self._row_bytes = 2 * num_extents * WORD_BYTES
        self._num_rows = FIRST_PEER_ROW + num_peers
        self.address = driver.allocate(self._num_rows * self._row_bytes)
        self._staging = driver.allocate_pinned(self._num_rows * self._row_bytes)
        self._free_rows = list(range(self._num_rows - 1, FIRST_PEER_ROW - 1, -1))

    def take_row(self) -> int:
        """A row for another peer.

        Raises:
            ValueError: when every row is in use: there are more peers than ranks.
        """
        if not self._free_rows:
            raise ValueError(f"no row left for another peer: {self._num_rows - FIRST_PEER_ROW} are open")
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def write(self, row: int, bases: Sequence[int], strides: Sequence[int]) -> None:
        """Fill a row, ahead of every copy that is enqueued from now on."""
        words: list[ctypes.c_int64 | int] = [*bases, *strides]
        if len(words) != 2 * self.num_extents:
            raise ValueError(f"{len(bases)} bases and {len(strides)} strides for {self.num_extents} extents")
        offset = row * self._row_bytes
        (ctypes.c_int64 * len(words)).from_address(self._staging + offset)[:] = words
        self._driver.copy_async(self.address + offset, self._staging + offset, self._row_bytes, self.stream)
