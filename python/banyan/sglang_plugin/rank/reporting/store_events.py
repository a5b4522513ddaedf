# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV events for what this rank has written to the store: its pages are in ``DISK``.

Invariants
  1. What comes to this rank's shelf of the store, or goes from it, is told in that order. A shelf has one writer: of
     several ranks, each page is told by one.
  2. What lies there anyway, from an earlier life too, is told slice by slice, and again from the beginning when all was
     told: to routers that came late, or have missed something.

One call costs the scheduler's thread a look at the keys that have moved, ``MOST_MOVED`` of them at most, and now and
then one at ``SLICE_PLACES`` places: 0.2 ms. SGLang calls when a forward has ended, or hundreds of times a second while
it is idle; while it sleeps, once a second. Pages of a writer that is gone are read, but told by nobody. Scheduler
thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang.srt.disaggregation.kv_events import StorageMedium

from banyan._native import Store
from banyan.sglang_plugin.rank.reporting.page_tokens import PageEvent, gone, there

MOST_MOVED = 4096
SLICE_PLACES = 4096
PAUSE_S = 0.2
"""Between two slices: a million pages take a minute, and some minutes where SGLang calls once a second."""

AGAIN_S = 600.0
"""From the last slice to the first of the next round."""


class StoreEvents:
    """Tells of one rank's shelf of a store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError when the store cannot say which one it is."""
        self.store_id = store.identity
        self._store = store
        self._clock = clock
        self._place = 0
        self._due_s = clock()

    def take(self) -> list[PageEvent]:
        """What has happened since the last call, and what is next of that which lies there."""
        # What has moved comes first: a slice is what is there now.
        stored, removed = self._store.moved(MOST_MOVED)
        return [*gone(removed, StorageMedium.DISK), *there([*stored, *self._slice()], StorageMedium.DISK)]

    def _slice(self) -> list[int]:
        now_s = self._clock()
        if now_s < self._due_s:
            return []
        names = self._store.own_pages(self._place, SLICE_PLACES)
        if names is None:
            self._place, self._due_s = 0, now_s + AGAIN_S
            return []
        self._place, self._due_s = self._place + SLICE_PLACES, now_s + PAUSE_S
        return names
