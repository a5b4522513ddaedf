# SPDX-License-Identifier: Apache-2.0
"""How long a layer of a prefill takes on the device: events on the forward's stream, read when they have passed.

Invariants
  1. Only a forward that was announced is timed, and only when nothing of it waits for a copy: a wait is no lesson.
  2. No call waits. A forward that never comes to its last layer is given up by the next one.

States of a forward: announced (``begin``) -> first layer marked -> last layer marked -> told (``poll``). Between the
two marks lie as many whole layers as the model has, less one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from banyan.transport.cuda_ipc.copies import EventPool
from banyan.transport.cuda_ipc.driver import CudaDriver

Forward = TypeVar("Forward")


class LayerTimer(Generic[Forward]):
    """Times forwards by what the caller calls them. One thread.

    Args:
        current_stream: that of the calling thread; None while it must not be marked (a graph is being captured).
        took: told of each forward in turn, with the microseconds of a layer.
    """

    def __init__(
        self,
        streams: CudaDriver,
        *,
        num_layers: int,
        current_stream: Callable[[], int | None],
        took: Callable[[Forward, float], None],
    ) -> None:
        self._streams = streams
        self._last_layer = num_layers - 1
        self._current_stream = current_stream
        self._took = took
        self._events = EventPool(streams, streams.create_timing_event)
        self._forward: Forward | None = None
        self._first: int | None = None
        self._marked: deque[tuple[Forward, int, int]] = deque()

    def begin(self, forward: Forward | None) -> None:
        """The next layers are those of ``forward``; None: of one that is not timed."""
        if self._first is not None:
            self._events.give([self._first])
        # A single layer has no other to be compared with.
        self._forward, self._first = forward if self._last_layer > 0 else None, None

    def tick(self, layer: int) -> None:
        """The forward is about to read the KV of ``layer``. Ticks of a layer after its first say nothing."""
        if self._forward is None:
            return
        if layer == 0 and self._first is None:
            self._first = self._mark()
        elif layer == self._last_layer and self._first is not None:
            last = self._mark()
            if last is not None:
                self._marked.append((self._forward, self._first, last))
                self._forward, self._first = None, None

    def _mark(self) -> int | None:
        stream = self._current_stream()
        if stream is None:
            return None
        event = self._events.take()
        self._streams.record_event(event, stream)
        return event

    def poll(self) -> None:
        """Tell of the forwards that the device has passed."""
        while self._marked and self._streams.is_event_done(self._marked[0][2]):
            forward, first, last = self._marked.popleft()
            layer_us = self._streams.elapsed_s(first, last) * 1e6 / self._last_layer
            self._events.give([first, last])
            self._took(forward, layer_us)
