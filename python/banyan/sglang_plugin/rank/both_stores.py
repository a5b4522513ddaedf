# SPDX-License-Identifier: Apache-2.0
"""The stores of a rank's kinds of pages as one, for whoever says how much may be written."""

from __future__ import annotations

from collections.abc import Sequence

from banyan.ports import PageStore


class BothStores:
    """Told what they may write as one; each gets its share."""

    def __init__(self, stores: Sequence[tuple[PageStore, float]]) -> None:
        self._stores = stores

    def pause_writes(self) -> None:
        for store, _ in self._stores:
            store.pause_writes()

    def set_write_budget(self, num_bytes: int) -> None:
        for store, share in self._stores:
            store.set_write_budget(int(num_bytes * share))

    def open_writes(self) -> None:
        for store, _ in self._stores:
            store.open_writes()

    def stats(self) -> dict[str, int]:
        """What `WriteRate` reads, of both: they write to one drive, mostly one after the other."""
        figures = [store.stats() for store, _ in self._stores]
        return {name: sum(of[name] for of in figures) for name in ("written_bytes", "writing_us")}
