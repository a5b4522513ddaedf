# SPDX-License-Identifier: Apache-2.0
"""When the store may write: never while a prefill runs, whose reads the drive belongs to; else whenever nobody reads.

States: open -> ``begin_prefill`` -> paused -> ``end``, or ``NUM_STEPS`` times ``step`` -> open. Called by one thread.
"""

from __future__ import annotations

from typing import Protocol

NUM_STEPS = 2
"""On a GPU nobody tells that a forward has ended. The scheduling step behind it waits for it, if nothing else is to be
computed: the one after that finds it ended."""


class StoreWrites(Protocol):
    """The two things that a store is told. Each holds until the next."""

    def pause_writes(self) -> None: ...

    def open_writes(self) -> None: ...


class WritePause:
    """Tells the stores of a rank, once for each change: a decode step after another says nothing."""

    def __init__(self, *stores: StoreWrites) -> None:
        self._stores = stores
        self._is_open = True
        self._num_steps = 0

    def begin_prefill(self) -> None:
        self._num_steps = 0
        if self._is_open:
            self._is_open = False
            for store in self._stores:
                store.pause_writes()

    def step(self) -> None:
        """A scheduling step has begun."""
        self._num_steps += 1
        if self._num_steps >= NUM_STEPS:
            self.end()

    def end(self) -> None:
        """The prefill has ended, or a decode step has begun."""
        if not self._is_open:
            self._is_open = True
            for store in self._stores:
                store.open_writes()
