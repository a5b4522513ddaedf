# SPDX-License-Identifier: Apache-2.0
"""One rank's pool as a tree of pages, which evicts leaves when it is full.

Invariants
  1. A page is held only while its parent is: leaves go first.
  2. A page that a request uses is locked, with all pages before it, and stays.
  3. No more than ``capacity`` pages are held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Page = int
Choose = Callable[[Sequence[Page]], Page]
"""The victim among leaves that may go, the least recently used first."""


@dataclass(slots=True)
class _Held:
    parent: Page | None
    num_children: int
    used_at: int
    num_locks: int = 0


class Tree:
    """``gone`` is told every page that leaves; ``window`` is how many leaves ``choose`` sees."""

    def __init__(self, capacity: int, *, choose: Choose, window: int, gone: Callable[[Page], None]) -> None:
        self._capacity = capacity
        self._choose = choose
        self._window = window
        self._gone = gone
        self._held: dict[Page, _Held] = {}
        self._leaves: list[tuple[int, Page]] = []
        self._now = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, page: Page) -> bool:
        return page in self._held

    @property
    def num_free(self) -> int:
        return self._capacity - len(self._held)

    def match(self, pages: Sequence[Page]) -> int:
        """Leading pages that are held."""
        for number, page in enumerate(pages):
            if page not in self._held:
                return number
        return len(pages)

    def touch(self, pages: Sequence[Page]) -> None:
        """These leading pages were used now."""
        self._now += 1
        for page in pages:
            held = self._held[page]
            held.used_at = self._now
        self._offer(pages[-1:])

    def lock(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._held[page].num_locks += 1

    def unlock(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._held[page].num_locks -= 1
        self._offer(pages[-1:])

    def insert(self, pages: Sequence[Page], num_matched: int) -> int:
        """Hold ``pages`` behind the first ``num_matched``, locked; how many fit."""
        self._now += 1
        for number in range(num_matched, len(pages)):
            if self.num_free == 0 and not self._evict():
                return number
            parent = pages[number - 1] if number else None
            self._held[pages[number]] = _Held(parent, 0, self._now, num_locks=1)
            if parent is not None:
                self._held[parent].num_children += 1
        return len(pages)

    def _offer(self, pages: Sequence[Page]) -> None:
        for page in pages:
            held = self._held[page]
            if not held.num_children and not held.num_locks:
                heapq.heappush(self._leaves, (held.used_at, page))

    def _evict(self) -> bool:
        candidates: list[tuple[int, Page]] = []
        while self._leaves and len(candidates) < self._window:
            entry = heapq.heappop(self._leaves)
            held = self._held.get(entry[1])
            stays = held is None or held.num_children or held.num_locks or held.used_at != entry[0]
            if not stays and entry not in candidates[-1:]:
                candidates.append(entry)
        if not candidates:
            return False
        victim = self._choose([page for _, page in candidates])
        for entry in candidates:
            if entry[1] != victim:
                heapq.heappush(self._leaves, entry)
        parent = self._held.pop(victim).parent
        if parent is not None:
            self._held[parent].num_children -= 1
            self._offer([parent])
        self._gone(victim)
        return True
