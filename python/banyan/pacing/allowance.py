# SPDX-License-Identifier: Apache-2.0
"""A token bucket: so much on average, with a burst.

Flash wears with every write: a drive rated for one drive write a day for five years must not see more. The bucket keeps
the average and lets a burst through, because conversations come in bursts. Messages of other nodes are bounded so, too.
"""

from __future__ import annotations


class Allowance:
    """What may be taken. The bucket starts full. Called by one thread, with a monotonic clock."""

    def __init__(self, *, per_s: float, burst: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._filled_s = now_s

    def take(self, amount: float, now_s: float) -> bool:
        """Take ``amount`` if it is there: all of it or nothing."""
        self._left = min(self._burst, self._left + max(0.0, now_s - self._filled_s) * self._per_s)
        self._filled_s = max(now_s, self._filled_s)
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def give_back(self, amount: float) -> None:
        """What was taken has not been used after all."""
        self._left = min(self._left + amount, self._burst)
