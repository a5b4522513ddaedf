# SPDX-License-Identifier: Apache-2.0
"""The per-layer clock: SGLang's pools announce every layer of every forward, and that is a clock for free.

States: idle -> ``begin`` -> in a forward -> ``tick(last layer)`` -> idle. A forward that never reaches its last layer
(an idle rank's dummy pass) is simply replaced by the next ``begin``.
"""

from __future__ import annotations

from banyan.ports import Clock
from banyan.telemetry.counters import Counters


class LayerClock:
    """Counts forwards and their time. On CPU the ticks are compute time; on CUDA they are launch time."""

    def __init__(self, *, num_layers: int, counters: Counters, clock: Clock) -> None:
        self._last_layer = num_layers - 1
        self._counters = counters
        self._clock = clock
        self._begun_ns = -1

    def begin(self) -> None:
        self._begun_ns = self._clock()

    def tick(self, layer: int) -> None:
        if layer != self._last_layer or self._begun_ns < 0:
            return
        self._counters.forwards += 1
        self._counters.forward_us += (self._clock() - self._begun_ns) // 1000
        self._begun_ns = -1
