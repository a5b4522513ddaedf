# SPDX-License-Identifier: Apache-2.0
"""The per-layer clock: SGLang's pools announce every layer of every forward, and that is a clock for free.

States: idle -> ``begin`` -> in a forward -> ``tick(last layer)`` -> idle. A forward that never reaches its last layer
(an idle rank's dummy pass) is simply replaced by the next ``begin``.

The time of one layer is taken from the first layer's first tick to the last layer's: between them lie as many whole
layers as the model has, less one. Time spent waiting for KV there is not compute time and is taken off.
"""

from __future__ import annotations

from collections.abc import Callable

from banyan.ports import Clock
from banyan.telemetry.counters import Counters

Ended = Callable[[float], None]
"""Called at the end of each forward with the time of one layer in microseconds."""


class LayerClock:
    """Counts forwards and their time. On CPU the ticks are compute time; on CUDA they are launch time."""

    def __init__(self, *, num_layers: int, counters: Counters, clock: Clock, ended: Ended | None = None) -> None:
        self._last_layer = num_layers - 1
        self._counters = counters
        self._clock = clock
        self._ended = ended
        self._begun_ns = -1
        self._first_tick_ns = -1
        self._waited_ns = 0

    def begin(self) -> None:
        self._begun_ns = self._clock()
        self._first_tick_ns = -1
        self._waited_ns = 0

    def tick(self, layer: int, waited_s: float = 0.0) -> None:
        """The forward reads the KV of ``layer``, having waited ``waited_s`` for it."""
        if self._begun_ns < 0:
            return
        if self._first_tick_ns >= 0:
            self._waited_ns += round(waited_s * 1e9)
        elif layer == 0:
            self._first_tick_ns = self._clock()
        if layer == self._last_layer:
            self._end(self._clock())

    def _end(self, now_ns: int) -> None:
        self._counters.forwards += 1
        self._counters.forward_us += (now_ns - self._begun_ns) // 1000
        self._begun_ns = -1
        if self._ended is not None and self._last_layer > 0 and self._first_tick_ns >= 0:
            self._ended((now_ns - self._first_tick_ns - self._waited_ns) / 1000 / self._last_layer)
