# SPDX-License-Identifier: Apache-2.0
"""The stores of a rank's kinds of pages as one, for whoever says when to write."""

from __future__ import annotations

from collections.abc import Sequence

from banyan.ports import PageStore


class BothStores:
    """Told as one when to write."""

    def __init__(self, stores: Sequence[PageStore]) -> None:
        self._stores = stores

    def pause_writes(self) -> None:
        for store in self._stores:
            store.pause_writes()

    def open_writes(self) -> None:
        for store in self._stores:
            store.open_writes()
