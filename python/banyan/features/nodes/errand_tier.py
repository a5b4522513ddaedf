# SPDX-License-Identifier: Apache-2.0
"""Carries out the errands of other nodes: brings pages from this rank's store into its part of the arena.

They are read as those of an own request would be, and stay in the arena; who asked then borrows them, and until then
they are not evicted. One thread calls; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.arena.page_source import Source
from banyan.arena.prefetch import Prefetch
from banyan.arena.residency import Residency
from banyan.core import SourceKind
from banyan.features.nodes.errands import Errand, Errands
from banyan.ports import Peers
from banyan.telemetry import Counters

NEWS_S = 0.3
"""What another server has just written may be announced a moment later."""

MOST_READS = 3
"""For one errand: a page that fails is not read over and over."""


@dataclass(slots=True, eq=False)
class _Begun:
    errand: Errand
    until_s: float
    num_reads: int = 0
    seen_version: int | None = None
    """Of the reads under way, when it was last looked at; None while it waits for news."""


class ErrandTier(Source):
    """One rank's. A source that brings pages for others: to the rank's own requests it has nothing to give."""

    def __init__(
        self,
        errands: Errands,
        *,
        prefetch: Prefetch,
        residency: Residency,
        peers: Peers,
        arena_slots: Sequence[int],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._errands = errands
        self._prefetch = prefetch
        self._residency = residency
        self._peers = peers
        self._arena_slots = list(arena_slots)
        self._counters = counters
        self._clock = clock
        self._begun: list[_Begun] = []
        self._held: dict[Errand, list[int]] = {}  # frames

    def poll(self) -> None:
        """Begin what has come, and answer what is over. Never blocks."""
        for errand in self._errands.let_go():
            self._residency.unhold(self._held.pop(errand, ()))
        for errand in self._errands.take():
            self._counters.errands += 1
            self._begun.append(_Begun(errand, self._clock() + NEWS_S))
        for begun in list(self._begun):
            if begun.seen_version == self._prefetch.version:
                continue
            num_here = self._peers.lookup(begun.errand.keys, self._arena_slots).num_pages
            if not self._goes_on(begun, num_here):
                self._begun.remove(begun)
                self._hold(begun.errand, num_here)
                self._errands.over(begun.errand, num_here)

    def _hold(self, errand: Errand, num_pages: int) -> None:
        """Keep those of the pages that are in this rank's part of the arena."""
        places = (self._residency.frame(key) for key in errand.keys[:num_pages])
        frames = [frame for frame in places if frame is not None]
        if frames:
            self._held[errand] = frames
            self._residency.hold(frames)

    def _goes_on(self, begun: _Begun, num_here: int) -> bool:
        """Whether more pages are coming behind those that are here; reads them if they are not on their way."""
        here, rest = begun.errand.keys[:num_here], begun.errand.keys[num_here:]
        if not rest:
            return False
        begun.seen_version = self._prefetch.version
        if self._prefetch.num_arriving(rest):
            return True
        begun.seen_version = None
        if begun.num_reads < MOST_READS:
            self._prefetch.start_reads(rest, _all_that_was_found, behind=here)
            if self._prefetch.num_arriving(rest):
                begun.num_reads += 1
                return True
        return begun.num_reads == 0 and self._clock() < begun.until_s

    def forget(self) -> None:
        """What is under way, or has been brought, is nobody's any more."""
        for begun in self._begun:
            self._errands.over(begun.errand, 0)
        self._begun.clear()
        for frames in self._held.values():
            self._residency.unhold(frames)
        self._held.clear()


def _all_that_was_found(num_missing: int, num_found: int, kind: SourceKind) -> int:
    """Whoever asks has weighed it."""
    return num_found
