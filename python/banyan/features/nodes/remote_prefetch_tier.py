# SPDX-License-Identifier: Apache-2.0
"""Carries out the remote prefetches of other nodes: brings pages from this rank's store into its part of the arena.

They are read as those of an own request would be, and stay in the arena; who asked then borrows them, and until then
they are not evicted. One thread calls; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan.arena.page_source import Source, all_that_is_found
from banyan.arena.prefetch import Prefetch
from banyan.arena.residency import Residency
from banyan.features.nodes.remote_prefetches import RemotePrefetch, RemotePrefetches
from banyan.telemetry import Counters

NEWS_S = 0.3
"""What another server has just written may be announced a moment later."""

LOOK_S = 0.05
"""Until it is looked for again: a look costs the scheduler two lookups of all the pages."""

MOST_READS = 3
"""For one remote prefetch: a page that fails is not read over and over."""


@dataclass(slots=True, eq=False)
class _Begun:
    remote_prefetch: RemotePrefetch
    until_s: float
    num_reads: int = 0
    seen_version: int | None = None
    """Of the reads under way, when it was last looked at; None while it waits for news."""
    look_at_s: float = 0.0
    """Not before: while it waits for news."""


class RemotePrefetchTier(Source):
    """One rank's. A source that brings pages for others: to the rank's own requests it has nothing to give."""

    def __init__(
        self,
        remote_prefetches: RemotePrefetches,
        *,
        prefetch: Prefetch,
        residency: Residency,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._remote_prefetches = remote_prefetches
        self._prefetch = prefetch
        self._residency = residency
        self._counters = counters
        self._clock = clock
        self._begun: list[_Begun] = []
        self._held: dict[RemotePrefetch, list[int]] = {}  # frames

    def poll(self) -> None:
        """Begin what has come, and answer what is over. Never blocks."""
        for remote_prefetch in self._remote_prefetches.let_go():
            self._residency.unhold(self._held.pop(remote_prefetch, ()))
        for remote_prefetch in self._remote_prefetches.take():
            self._counters.remote_prefetches += 1
            self._begun.append(_Begun(remote_prefetch, self._clock() + NEWS_S))
        for begun in list(self._begun):
            if begun.seen_version == self._prefetch.version or self._clock() < begun.look_at_s:
                continue
            num_here = self._prefetch.num_in_arena(begun.remote_prefetch.keys)
            if not self._goes_on(begun, num_here):
                self._begun.remove(begun)
                self._hold(begun.remote_prefetch, num_here)
                self._remote_prefetches.over(begun.remote_prefetch, num_here)

    def _hold(self, remote_prefetch: RemotePrefetch, num_pages: int) -> None:
        """Keep those of the pages that are in this rank's part of the arena."""
        places = (self._residency.frame(key) for key in remote_prefetch.keys[:num_pages])
        frames = [frame for frame in places if frame is not None]
        if frames:
            self._held[remote_prefetch] = frames
            self._residency.hold(frames)

    def _goes_on(self, begun: _Begun, num_here: int) -> bool:
        """Whether more pages are coming behind those that are here; reads them if they are not on their way."""
        here, rest = begun.remote_prefetch.keys[:num_here], begun.remote_prefetch.keys[num_here:]
        if not rest:
            return False
        begun.seen_version = self._prefetch.version
        if self._prefetch.num_arriving(rest):
            return True
        begun.seen_version = None
        if begun.num_reads < MOST_READS:
            self._prefetch.start_reads(rest, all_that_is_found, behind=here)
            if self._prefetch.num_arriving(rest):
                begun.num_reads += 1
                return True
        now_s = self._clock()
        begun.look_at_s = now_s + LOOK_S
        return begun.num_reads == 0 and now_s < begun.until_s

    def forget(self) -> None:
        """What is under way, or has been brought, is nobody's any more."""
        for begun in self._begun:
            self._remote_prefetches.over(begun.remote_prefetch, 0)
        self._begun.clear()
        for frames in self._held.values():
            self._residency.unhold(frames)
        self._held.clear()
