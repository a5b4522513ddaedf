# SPDX-License-Identifier: Apache-2.0
"""How much time the running forward pass still gives to writes.

States: idle -> ``begin`` -> in a forward (``reach`` at each layer) -> ``end`` -> idle. Idle time is unlimited slack:
the next forward's reads wait for two writes at most. A forward that overruns its prediction has none
left. Called by one thread; times are nanoseconds of one monotonic clock.
"""

from __future__ import annotations

import math

from banyan.pacing.layer_times import LayerTimes
from banyan.pacing.slack_table import ForwardShape


class ForwardSlack:
    """Follows one forward pass after the other through its layers."""

    def __init__(self, times: LayerTimes, *, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers {num_layers}: at least 1")
        self._times = times
        self._num_layers = num_layers
        self._layer = -1
        self._layer_since_ns = 0
        self._safe_layer_us = 0.0

    @property
    def is_idle(self) -> bool:
        return self._layer < 0

    def begin(self, shape: ForwardShape, now_ns: int) -> None:
        """A forward of ``shape`` starts. A forward that never ended is replaced."""
        self._safe_layer_us = self._times.safe_us(shape)
        self._layer = 0
        self._layer_since_ns = now_ns

    def reach(self, layer: int, now_ns: int) -> None:
        """The forward has come to ``layer`` (from 0). Ignored when idle, as when a dummy forward ticks."""
        if self._layer >= 0:
            self._layer = layer
            self._layer_since_ns = now_ns

    def end(self) -> None:
        self._layer = -1

    def layer_slack_us(self, now_ns: int) -> float:
        """Time that the running layer still needs; infinite when idle."""
        if self.is_idle:
            return math.inf
        return max(0.0, self._safe_layer_us - (now_ns - self._layer_since_ns) / 1000)

    def forward_slack_us(self, now_ns: int) -> float:
        """Time that the running layer and those behind it still need; infinite when idle."""
        if self.is_idle:
            return math.inf
        num_behind = self._num_layers - 1 - self._layer
        return self.layer_slack_us(now_ns) + num_behind * self._safe_layer_us
