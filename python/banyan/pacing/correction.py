# SPDX-License-Identifier: Apache-2.0
"""What a fit is wrong by today: measured over predicted time, followed for each class of forward.

A fit grows old: another clock rate, a neighbour on the machine. Decode steps, short and long prefills err
differently, so each class of lengths (1, 2-7, 8-31, 32-127, ...) has a ratio of its own. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Collection

from banyan.telemetry import Estimate

MIN_RATIO, MAX_RATIO = 1 / 8, 8.0
"""One forward (a page fault, a suspended process) may count for no more than this."""

CLASS_BITS = 2


class Correction:
    """Ratios of measured to predicted time."""

    def __init__(self) -> None:
        self._ratios: dict[int, Estimate] = {}

    def observe(self, extend_tokens: int, *, predicted_us: float, measured_us: float) -> None:
        """A forward of so many new tokens was predicted and is measured. Times that are not positive are ignored."""
        if predicted_us > 0 and measured_us > 0:
            ratio = min(max(measured_us / predicted_us, MIN_RATIO), MAX_RATIO)
            self._ratios.setdefault(length_class(extend_tokens), Estimate()).observe(ratio)

    def ratio(self, extend_tokens: int) -> tuple[float, float]:
        """Mean and deviation of the ratio; of the nearest class that was seen, else 1 and 0: the fit's word."""
        if not self._ratios:
            return 1.0, 0.0
        estimate = self._ratios[nearest(length_class(extend_tokens), self._ratios)]
        return estimate.mean, estimate.deviation

    def forget(self) -> None:
        """The predictions are about to change."""
        self._ratios.clear()


def length_class(num_tokens: int) -> int:
    """Lengths within a factor of four of each other share a class."""
    return num_tokens.bit_length() // CLASS_BITS


def nearest(wanted: int, seen: Collection[int]) -> int:
    """The class that is closest to the wanted one; the shorter of two."""
    if wanted in seen:
        return wanted
    return min(seen, key=lambda other: (abs(other - wanted), other))


def shortest_of_class(number: int) -> int:
    """The smallest length in a class: 0, 2, 8, 32, ..."""
    return 0 if number == 0 else 1 << (CLASS_BITS * number - 1)
