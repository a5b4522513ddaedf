# SPDX-License-Identifier: Apache-2.0
"""A measured quantity that drifts: exponentially weighted mean, and how far off it usually is."""

from __future__ import annotations


class Estimate:
    """Mean and mean absolute deviation of a stream of values, newer values counting more.

    The weight of a new value is ``1 / count`` until it reaches ``weight``, so the first values are plainly averaged.
    """

    __slots__ = ("_weight", "count", "deviation", "mean")

    def __init__(self, weight: float = 0.125) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"weight {weight}: above 0 and at most 1")
        self._weight = weight
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def observe(self, value: float) -> None:
        """Take one more value in. The deviation is from the mean as it was before: the error of a prediction."""
        self.count += 1
        if self.count == 1:
            self.mean = value
            return
        weight = max(self._weight, 1.0 / self.count)
        self.deviation += max(self._weight, 1.0 / (self.count - 1)) * (abs(value - self.mean) - self.deviation)
        self.mean += weight * (value - self.mean)
