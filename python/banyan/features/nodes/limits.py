# SPDX-License-Identifier: Apache-2.0
"""How much is listened to, and how often the same is said: pure, the clock is the caller's."""

from __future__ import annotations

from collections.abc import Callable


class Allowance:
    """So many a second, and no more than ``burst`` at once."""

    def __init__(self, *, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left = burst
        self._at_s = clock()

    def take(self) -> bool:
        """Whether one more is within the allowance."""
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
