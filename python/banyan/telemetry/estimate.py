# SPDX-License-Identifier: Apache-2.0
"""A measured quantity that drifts: exponentially weighted mean, and how far off it usually is."""

from __future__ import annotations

WEIGHT = 0.125


class Estimate:
    """Mean and mean absolute deviation of a stream of values, newer values counting more.

    The weight of a new value is ``1 / count`` until it reaches ``WEIGHT``, so the first values are plainly averaged.
    """

    __slots__ = ("count", "deviation", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def observe(self, value: float) -> None:
        """Take one more value in. The deviation is from the mean as it was before: the error of a prediction."""
        self.count += 1
        if self.count == 1:
            self.mean = value
            return
        weight = max(WEIGHT, 1.0 / self.count)
        self.deviation += max(WEIGHT, 1.0 / (self.count - 1)) * (abs(value - self.mean) - self.deviation)
        self.mean += weight * (value - self.mean)
