# SPDX-License-Identifier: Apache-2.0
"""A drive's endurance as a token bucket: so many bytes a day on average, with a burst.

Flash wears with every write. A drive rated for one drive write a day for five years must not see more; a bucket keeps
the average and lets a burst through, because conversations come in bursts.
"""

from __future__ import annotations

DAY_NS = 24 * 3600 * 10**9


class WriteBudget:
    """Bytes that may be written. The bucket starts full. Called by one thread, with a monotonic clock."""

    def __init__(self, *, bytes_per_day: int, burst_bytes: int, now_ns: int) -> None:
        """Raises ValueError for a budget without bytes."""
        if bytes_per_day < 1 or burst_bytes < 1:
            raise ValueError(f"bytes_per_day {bytes_per_day}, burst_bytes {burst_bytes}: at least 1")
        self._bytes_per_day = bytes_per_day
        self._burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._filled_ns = now_ns

    def take(self, num_bytes: int, now_ns: int) -> bool:
        """Spend ``num_bytes`` if they are there: all of them or none."""
        self._fill(now_ns)
        if num_bytes > self._tokens:
            return False
        self._tokens -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """What was taken has not been written after all."""
        self._tokens = min(self._tokens + num_bytes, float(self._burst_bytes))

    def _fill(self, now_ns: int) -> None:
        elapsed_ns = max(0, now_ns - self._filled_ns)
        self._filled_ns += elapsed_ns
        gained = self._bytes_per_day * elapsed_ns / DAY_NS
        self._tokens = min(self._tokens + gained, float(self._burst_bytes))
