# SPDX-License-Identifier: Apache-2.0
"""From the arena to the store: pages that are worth a write go down in the background.

Invariants
  1. A frame whose page is being written is held from ``put`` until the store names its key in ``completed``.
  2. ``quiesce`` waits for ``QUIESCE_S`` at most. What the store is still writing then keeps its frames.
  3. A page is offered only behind its parent; what the store refuses is not written, and counted. Nothing waits.

One thread calls; the store writes on its own, when its gate lets it.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence

from banyan.arena.lineage import ROOT, Lineage
from banyan.arena.owners import Owners
from banyan.arena.residency import Residency
from banyan.core import PageKey
from banyan.pacing.admission import WriteAdmission, WriteVerdict
from banyan.ports import Clock, PageStore
from banyan.telemetry import Counters

logger = logging.getLogger("banyan")

QUIESCE_S = 10.0
"""So long the scheduler, and every rank that steps with it, stands still for a drive."""
QUEUED = "queued"
ORPHAN = "orphan"
PRESENT = ("present", "elsewhere")


class Archive:
    """Writes pages of one rank's part of the arena."""

    def __init__(
        self,
        *,
        store: PageStore,
        residency: Residency,
        lineage: Lineage,
        owners: Owners,
        admission: WriteAdmission,
        memory: object,
        frame_bytes: int,
        record_bytes: int,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._store = store
        self._residency = residency
        self._lineage = lineage
        self._owners = owners
        self._admission = admission
        self._memory = memory
        self._frame_bytes = frame_bytes
        self._record_bytes = record_bytes
        self._counters = counters
        self._clock = clock
        self._writing: dict[str, deque[int]] = {}
        """Frames, by key: each write of a page has its own end, in their order."""

    def note_access(self, keys: Sequence[str], num_stored: int) -> Sequence[str]:
        """A chain of pages has come up or has been asked for, and the store has the first ``num_stored``: write those
        that are resident here and worth it.

        Returns the pages that were refused because the store does not have the page before them; counting those is the
        caller's, who may offer them again.
        """
        num_known = num_stored
        while num_known < len(keys) and keys[num_known] in self._writing:
            num_known += 1
        worth: list[str] = []
        has_gap = False
        for key in keys[num_known:]:
            if self._residency.frame(key) is None:
                break
            # Every page is judged, so that each is remembered; what follows a gap would be an orphan.
            is_worth = self._is_worth(key)
            has_gap |= not is_worth
            if is_worth and has_gap:
                self._admission.give_back(PageKey(key), self._record_bytes)
            elif is_worth:
                worth.append(key)
        parent = self._lineage.parent(worth[0]) if worth else None
        if parent is not None:
            return self._put(worth, None if parent == ROOT else parent)
        for key in worth:
            self._admission.give_back(PageKey(key), self._record_bytes)
        self._counters.archive_refused_pages += len(worth)
        return ()

    def _is_worth(self, key: str) -> bool:
        verdict = self._admission.judge(PageKey(key), self._record_bytes, self._clock())
        is_over = verdict is WriteVerdict.OVER_BUDGET
        self._counters.archive_refused_pages += is_over
        self._counters.archive_over_budget_pages += is_over
        return verdict is WriteVerdict.QUEUED

    def _put(self, keys: list[str], parent: str | None) -> Sequence[str]:
        frames = [frame for key in keys if (frame := self._residency.frame(key)) is not None]
        offsets = array("q", [frame * self._frame_bytes for frame in frames])
        answers = self._owners.put(self._store, keys, parent, self._memory, offsets)
        is_orphan = answers[0] == ORPHAN
        for key, frame, answer in zip(keys, frames, answers, strict=True):
            if answer == QUEUED:
                self._writing.setdefault(key, deque()).append(frame)
                self._residency.hold([frame])
            elif answer in PRESENT:
                # Nobody names it as completed: nothing is spent on it.
                self._admission.unspend(self._record_bytes)
            else:
                self._admission.give_back(PageKey(key), self._record_bytes)
                self._counters.archive_refused_pages += not is_orphan
        return keys if is_orphan else ()

    def poll(self) -> None:
        """Let go of what has been written since the last call. Never blocks."""
        for key, outcome in self._store.completed():
            frames = self._writing.get(key)
            if frames is None:
                continue
            self._residency.unhold([frames.popleft()])
            if not frames:
                del self._writing[key]
            if outcome == "present":
                # It was there: nothing was spent on it.
                self._admission.unspend(self._record_bytes)
            elif outcome == "failed":
                # Most of those were never begun: the queue was given up.
                self._admission.give_back(PageKey(key), self._record_bytes)
            self._counters.archived_pages += outcome == "stored"
            self._counters.archive_failed_pages += outcome == "failed"

    @property
    def num_left_behind(self) -> int:
        """Pages whose frames the store may still read."""
        return len(self._writing)

    def quiesce(self) -> None:
        """Wait until the store has written what was queued, and let every frame go that it is done with."""
        try:
            self._store.sync(QUIESCE_S)
        except OSError as error:
            logger.error("banyan: nobody waits for the store any longer (--banyan-store): %s", error)
        self.poll()
