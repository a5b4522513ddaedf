# SPDX-License-Identifier: Apache-2.0
"""The slack table, corrected by what the per-layer clock sees while the server runs. Called by one thread."""

from __future__ import annotations

from banyan.pacing.correction import Correction
from banyan.pacing.slack_table import ForwardShape, SlackTable


class LayerTimes:
    """Predicts the time of one layer of a forward, and learns from each forward that ends."""

    def __init__(self, table: SlackTable) -> None:
        self._table = table
        self._correction = Correction()

    def observe(self, shape: ForwardShape, layer_us: float) -> None:
        """A forward of ``shape`` took ``layer_us`` for each layer, waits for data not counted."""
        predicted_us = self._table.time_us(shape)
        self._correction.observe(shape.extend_tokens, predicted_us=predicted_us, measured_us=layer_us)

    def safe_us(self, shape: ForwardShape) -> float:
        """A time that a layer seldom falls short of: what may be given to writes. Never below zero."""
        ratio, deviation = self._correction.ratio(shape.extend_tokens)
        return self._table.time_us(shape) * max(0.0, ratio - deviation)
