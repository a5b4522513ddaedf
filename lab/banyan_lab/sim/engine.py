# SPDX-License-Identifier: Apache-2.0
"""The event loop: a heap in a total order, and the clock it drives.

Invariants
  1. Events run in the order (time, priority, sequence of scheduling). Equal runs are equal to the last bit.
  2. The clock never goes back, and nothing is scheduled in the past.
  3. Nothing here or above reads a wall clock or an unseeded source of chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]

FIRST, NORMAL = 0, 1
"""Priorities of events at the same moment. What ends comes before what begins with the room that it leaves."""


class PastEvent(ValueError):
    """Somebody tried to schedule before now."""


class Simulation:
    """Virtual time in seconds, and the events that are due. One thread."""

    __slots__ = ("_heap", "_sequence", "now_s", "num_events", "seed")

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.seed = seed
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Action, tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, action: Action, *args: Any, priority: int = NORMAL) -> None:
        """Run ``action(*args)`` at ``time_s``.

        Raises:
            PastEvent: when that moment is over, or is no moment.
        """
        if not time_s >= self.now_s:
            raise PastEvent(f"scheduled for {time_s} s, at {self.now_s} s")
        self._sequence += 1
        heappush(self._heap, (time_s, priority, self._sequence, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Run ``action(*args)`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action, *args)

    def run(self, until_s: float = math.inf) -> None:
        """Run events up to and including ``until_s``, or until none is left. The clock stays at the last one run."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, _, action, args = heappop(heap)
            self.num_events += 1
            action(*args)

    def chance(self, name: str) -> random.Random:
        """A stream of chance of its own for each name: a new consumer does not shift what the others draw."""
        return random.Random(f"{self.seed}/{name}")
