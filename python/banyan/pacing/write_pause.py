# SPDX-License-Identifier: Apache-2.0
"""When the store may write: never while a prefill runs, whose reads the drive belongs to; else whenever nobody reads.

States: open -> ``begin_prefill`` -> paused -> ``end`` -> open. Called by one thread.
"""

from __future__ import annotations

from typing import Protocol


class StoreWrites(Protocol):
    """The two things that a store is told. Each holds until the next."""

    def pause_writes(self) -> None: ...

    def open_writes(self) -> None: ...


class WritePause:
    """Tells one store, once for each change: a decode step after another says nothing."""

    def __init__(self, store: StoreWrites) -> None:
        self._store = store
        self._is_open = True

    def begin_prefill(self) -> None:
        if self._is_open:
            self._is_open = False
            self._store.pause_writes()

    def end(self) -> None:
        """The prefill has ended, or a decode step has begun."""
        if not self._is_open:
            self._is_open = True
            self._store.open_writes()
