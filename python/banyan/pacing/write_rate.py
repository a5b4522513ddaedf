# SPDX-License-Identifier: Apache-2.0
"""How fast the store's drive takes what is written, learned from what was."""

from __future__ import annotations

from collections.abc import Callable

FIRST_WRITE_BYTES_PER_US = 500.0
"""Taken for granted until writes were measured: a quarter of what one NVMe drive took as durable appends (fio)."""
SAMPLE_BYTES = 16 << 20
"""Less than this says more about one sync than about the drive."""


class WriteRate:
    """``counted`` tells the bytes made durable so far and the microseconds in which something was being written."""

    def __init__(self, counted: Callable[[], tuple[int, int]]) -> None:
        self._counted = counted
        self._seen = (0, 0)
        self._bytes_per_us: float | None = None

    def bytes_per_us(self) -> float:
        """The mean of the last sample and of what was known before it: drives that others use change within seconds."""
        counted = self._counted()
        num_bytes, num_us = counted[0] - self._seen[0], counted[1] - self._seen[1]
        if num_bytes >= SAMPLE_BYTES and num_us > 0:
            self._seen = counted
            now = num_bytes / num_us
            self._bytes_per_us = now if self._bytes_per_us is None else (self._bytes_per_us + now) / 2
        return FIRST_WRITE_BYTES_PER_US if self._bytes_per_us is None else self._bytes_per_us
