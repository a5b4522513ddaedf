# SPDX-License-Identifier: Apache-2.0
"""Layers of a hand-over that leave while later ones are still computed.

SGLang sends a chunk of a prompt when its forward has ended. An advance sends the layers that are complete before: the
scheduler's thread says how many there are, and the sender's thread takes them in layer batches, entries of its queue:
as many as have come together since the one before. What is left is sent with the chunk itself.

Invariants
  1. A layer is taken once, in order, and after it is complete.
  2. No more than one layer batch waits in the queue, so that a slow network gets few large ones.
  3. No layer batch is so small that sending it with the chunk would have been cheaper: a fast network gets few as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_LAYER_BATCH_BYTES = 256 << 10
"""A smaller one costs more than it brings: of a short prompt nothing is sent in advance."""

LEAST_LAYER_BATCH_S = 0.002
"""So long the network is to be busy with one. What it costs, a fifth of that, comes out of the forward that it is to
hide behind."""

FADE = 0.9
"""Of what a network was once seen to do, what is believed after each further transfer."""


class Pace:
    """How fast a network takes layer batches: the best of late, as others are held up by the forward beside them.
    Written by the senders' threads, read by the scheduler's."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0

    def sent(self, num_bytes: int, duration_s: float) -> None:
        """So much has left in so long."""
        self._bytes_per_s = max(FADE * self._bytes_per_s, num_bytes / max(duration_s, 1e-6))

    @property
    def least_bytes(self) -> int:
        """Of a layer batch."""
        return max(LEAST_LAYER_BATCH_BYTES, int(self._bytes_per_s * LEAST_LAYER_BATCH_S))


class Advance:
    """One request's pages in one forward. The scheduler's thread calls ``completed``, the sender's the others.

    States: waiting for layers -> a layer batch is asked for -> taken -> waiting ... The chunk sends what ``num_taken``
    leaves.
    """

    def __init__(self, *, layer_bytes: int, least_bytes: int) -> None:
        """``layer_bytes``: of all its pages in one layer; ``least_bytes``: of a layer batch."""
        self._least_layers = max(1, -(-least_bytes // max(1, layer_bytes)))
        self._num_complete = 0
        self._layer_batch_waits = False
        self.num_taken = 0

    def completed(self, num_layers: int) -> bool:
        """The first ``num_layers`` are complete. Whether a layer batch is to be put into the queue: one for
        each True."""
        self._num_complete = max(self._num_complete, num_layers)
        if self._layer_batch_waits or self._num_complete - self.num_taken < self._least_layers:
            return False
        self._layer_batch_waits = True
        return True

    def take(self) -> range:
        """A layer batch is due: the layers that it sends."""
        # In this order: a layer that is completed in between finds that none waits, and asks for another.
        self._layer_batch_waits = False
        layers = range(self.num_taken, self._num_complete)
        self.num_taken = layers.stop
        return layers


def layers_of_regions(
    num_regions: int, *, num_layers: int, num_draft_regions: int, parts_per_layer: int
) -> tuple[int, ...] | None:
    """Which layer each region of a pool belongs to, where SGLang registers part by part, each over all layers (all
    keys, then all values), and a draft's behind them: these count as behind the last layer. None where the regions are
    others than that."""
    if num_regions - num_draft_regions != parts_per_layer * num_layers:
        return None
    return (*list(range(num_layers)) * parts_per_layer, *[num_layers] * num_draft_regions)


class Forwards:
    """Who is to hear how many layers a prefill forward has completed. The scheduler's thread.

    States: nothing -> announced (a batch was chosen) -> running (its forward has begun) -> announced ...
    """

    def __init__(self) -> None:
        self._announced: Sequence[Callable[[int], None]] = ()
        self._running: Sequence[Callable[[int], None]] = ()

    def announce(self, listeners: Sequence[Callable[[int], None]]) -> None:
        """The forward that begins next is for these; each is told a number of layers."""
        self._announced = listeners

    def begin(self) -> None:
        """A forward begins. One that was not announced completes nothing of anybody's."""
        self._running, self._announced = self._announced, ()

    def completed(self, num_layers: int) -> None:
        """The running forward has completed its first ``num_layers``."""
        for listener in self._running:
            listener(num_layers)
