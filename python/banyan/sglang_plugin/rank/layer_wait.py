# SPDX-License-Identifier: Apache-2.0
"""What SGLang's pools call before they read a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from banyan import faults
from banyan.cache import NOTHING_QUEUED, PrefixCache
from banyan.ports import Copy, LayerWatch
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.access import DeviceTimer
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.reporting.spans import TracedForward
from banyan.telemetry import LayerClock


class LayerWait:
    """What SGLang's pools call before they read a layer: the copy's progress, the per-layer clock, and who hears of
    completed layers (``tell``).

    A draft runs behind the model's last layer: whoever waits for that waits for ``num_page_layers``, all that a page
    has. ``timer`` is None where the forward runs on the calling thread.
    """

    def __init__(
        self,
        cache: PrefixCache,
        clock: LayerClock,
        planner: RankPlanner,
        num_layers: int,
        num_page_layers: int,
        timer: DeviceTimer | None,
    ) -> None:
        self.num_layers = num_layers
        self.consumer_index = NOTHING_QUEUED
        self._cache = cache
        self._clock = clock
        self._planner = planner
        self._timer = timer
        self._watches: list[LayerWatch] = []
        self._last_page_layer = num_page_layers - 1
        self._copy: Any = None
        self._traced: TracedForward | None = None
        # SGLang calls these in the midst of a forward. One that could not wait has read what it should not have.
        begin = runtime.STOPWATCH.wrap("layer_wait.set_consumer", self.set_consumer)
        self.set_consumer = faults.quiet(begin, "layer_wait.set_consumer", self._lose)  # type: ignore[method-assign]
        self._see = faults.quiet(self.wait_until, "layer_wait.wait_until", self._lose_this)
        self.wait_until = self._see  # type: ignore[method-assign]

    def _lose(self, index: int) -> None:
        self._copy = self._traced = None
        self._cache.lose(index)

    def _lose_this(self, layer: int) -> None:
        self._lose(self.consumer_index)

    def tell(self, watch: LayerWatch) -> None:
        """From now on ``watch`` hears of the layers that forwards complete."""
        self._watches.append(watch)

    def wait_for(self, copies: Iterable[Copy]) -> None:
        """Return once all of these are in place, or have failed; on a GPU, have what is enqueued from now on wait."""
        for copy in copies:
            copy.wait_layer(self._last_page_layer)

    def set_consumer(self, index: int) -> None:
        """The next forward consumes batch ``index``; -1: it waits for nothing."""
        self.consumer_index = index
        self._copy = self._cache.moving(index)
        self._planner.forward_begins()
        traced = self._planner.spans.forward_begins(self._copy, self.num_layers)
        # Where the device has a clock of its own, what is seen here are launches.
        self._traced = traced if self._timer is None else None
        for watch in self._watches:
            watch.begin()
        self._clock.begin()
        if self._timer is not None:
            pieces = self._planner.pieces_running
            self._timer.begin(pieces if pieces and self._copy is None else None)
        # Pools call it several times a layer of every forward, and few forwards have anybody to tell.
        is_told_all = self._copy or self._traced or self._watches or self._timer
        self.wait_until = self._see if is_told_all else self._see_ends  # type: ignore[method-assign]

    def _see_ends(self, layer: int) -> None:
        """``wait_until``, of a forward in which nobody but the clock hears of layers: it asks for two."""
        if layer in (0, self.num_layers - 1):
            self._see(layer)

    def wait_until(self, layer: int) -> None:
        """Return once ``layer`` of the current batch is in place."""
        for watch in self._watches:
            watch.completed(layer)
        waited_s = 0.0
        if self._copy is not None:
            waited_s = self._copy.wait_layer(layer if layer < self.num_layers - 1 else self._last_page_layer)
        self._clock.tick(layer, waited_s)
        if self._traced is not None:
            self._traced.reads(layer, waited_s)
        if self._timer is not None:
            self._timer.tick(layer)
