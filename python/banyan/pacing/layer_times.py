# SPDX-License-Identifier: Apache-2.0
"""The slack table, corrected by what the per-layer clock sees while the server runs.

A profile grows old: other clocks, a neighbour on the machine, a mixed batch. The ratio of measured to predicted time is
followed for each class of forward (decode steps, short and long prefills err differently), and a prediction is the
table times that ratio, less what it is usually wrong by. Called by one thread.
"""

from __future__ import annotations

from banyan.pacing.slack_table import ForwardShape, SlackTable
from banyan.telemetry import Estimate

MIN_RATIO, MAX_RATIO = 1 / 8, 8.0
"""One forward (a page fault, a suspended process) may count for no more than this."""

CLASS_BITS = 2
"""Classes are powers of four of the new tokens: 1-3, 4-15, 16-63, ..."""


class LayerTimes:
    """Predicts the time of one layer of a forward, and learns from each forward that ends."""

    def __init__(self, table: SlackTable) -> None:
        self._table = table
        self._ratios: dict[int, Estimate] = {}

    def observe(self, shape: ForwardShape, layer_us: float) -> None:
        """A forward of ``shape`` took ``layer_us`` for each layer, waits for data not counted."""
        predicted_us = self._table.time_us(shape)
        if predicted_us > 0 and layer_us > 0:
            ratio = min(max(layer_us / predicted_us, MIN_RATIO), MAX_RATIO)
            self._ratios.setdefault(_class_of(shape), Estimate()).observe(ratio)

    def expected_us(self, shape: ForwardShape) -> float:
        """The likeliest time of one layer."""
        return self._table.time_us(shape) * self._ratio(shape)[0]

    def safe_us(self, shape: ForwardShape) -> float:
        """A time that a layer will hardly fall short of: what may be given to writes. Never below zero."""
        ratio, deviation = self._ratio(shape)
        return self._table.time_us(shape) * max(0.0, ratio - deviation)

    def _ratio(self, shape: ForwardShape) -> tuple[float, float]:
        """Ratio and deviation of the shape's class; of the nearest class that was seen, else the table's word."""
        if not self._ratios:
            return 1.0, 0.0
        wanted = _class_of(shape)
        nearest = min(self._ratios, key=lambda seen: (abs(seen - wanted), seen))
        estimate = self._ratios[nearest]
        return estimate.mean, estimate.deviation


def _class_of(shape: ForwardShape) -> int:
    return shape.extend_tokens.bit_length() // CLASS_BITS
