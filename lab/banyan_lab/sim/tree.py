# SPDX-License-Identifier: Apache-2.0
"""One rank's pool as SGLang's tree, which evicts leaves when it is full: in the walks that Banyan's eviction makes.

What is inserted at once is one node, until a prompt parts from it or ends in it, and a leaf goes as a whole: more than
was wanted goes. Shipped is a split of long nodes (``banyan.planner.stretches``).

Invariants
  1. A page is held only while its parent is: leaves go first.
  2. A page that a request uses is locked, with all pages before it, and stays.
  3. No more than ``capacity`` pages are held or reserved.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from banyan.planner.stretches import least_stretch, splits
from banyan.planner.victims import Leaf, Looks, Walk, at_once

Page = int
Look = Callable[[Sequence[Page]], Sequence[Leaf]]


def page_number(page: Page) -> int:
    """What ``_native.Demand`` calls a page here: it hashes as well as a page's key does."""
    return hash((page,))


def page_numbers(pages: Iterable[Page]) -> bytes:
    return array("q", map(page_number, pages)).tobytes()


@dataclass(slots=True)
class _Held:
    parent: Page | None
    num_children: int
    used_at: int
    num_locks: int = 0
    ends_node: bool = False
    is_split: bool = False
    """Its node ends there because a long one was split."""


@dataclass(slots=True)
class Victims:
    """How leaves are chosen: what a look sees, how many are looked at before an eviction, and who looks further.

    ``splits``: long nodes are split, once a page has had to go.
    """

    look: Look
    near: int
    looks: Looks | None = None
    splits: bool = False


class Tree:
    """``gone`` is told every page that leaves."""

    def __init__(self, capacity: int, *, victims: Victims, gone: Callable[[Page], None]) -> None:
        self._capacity = capacity
        self._victims = victims
        self._gone = gone
        self._held: dict[Page, _Held] = {}
        self._leaves: list[tuple[int, Page]] = []
        self._num_reserved = self._now = 0
        self._has_evicted = self._has_uncovered = False

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, page: Page) -> bool:
        return page in self._held

    @property
    def num_free(self) -> int:
        return self._capacity - self._num_reserved - len(self._held)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody uses."""
        return sum(1 for held in self._held.values() if not held.num_locks)

    def spare(self, is_elsewhere: Callable[[Page], bool]) -> set[Page]:
        """Pages that could go now, each with all behind it, and nothing would be lost: nobody uses them, and another
        pool holds them too."""
        kept: set[Page] = set()
        # Whoever was held first stands before.
        for page, held in reversed(self._held.items()):
            if held.num_locks or not is_elsewhere(page):
                kept.add(page)
            if page in kept and held.parent is not None:
                kept.add(held.parent)
        return self._held.keys() - kept

    def match(self, pages: Sequence[Page]) -> int:
        """Leading pages that are held."""
        for number, page in enumerate(pages):
            if page not in self._held:
                return number
        return len(pages)

    def touch(self, pages: Sequence[Page]) -> None:
        """A prompt has matched these leading pages: they were used now, and a node ends with them."""
        self._now += 1
        for page in pages:
            held = self._held[page]
            held.used_at = self._now
        held.ends_node = True
        self._offer(pages[-1])

    def lock(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._held[page].num_locks += 1

    def unlock(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._held[page].num_locks -= 1
        if pages:
            self._offer(pages[-1])

    def reserve(self, num_pages: int) -> bool:
        """Set room aside for pages that are being computed; False where not enough can go for it."""
        if num_pages > self.num_free:
            self._evict(num_pages - self.num_free)
        if num_pages > self.num_free:
            return False
        self._num_reserved += num_pages
        return True

    def give_back(self, num_pages: int) -> None:
        self._num_reserved -= num_pages

    def insert(self, pages: Sequence[Page], num_matched: int) -> int:
        """Hold ``pages`` behind the first ``num_matched``, locked; how many fit."""
        self._now += 1
        missing = len(pages) - num_matched - self.num_free
        if missing > 0:
            self._evict(missing)
        num_held = min(len(pages), num_matched + self.num_free)
        if num_held <= num_matched:
            return num_held
        for number in range(num_matched, num_held):
            parent = pages[number - 1] if number else None
            self._held[pages[number]] = _Held(parent, 0, self._now, num_locks=1)
            if parent is not None:
                self._held[parent].num_children += 1
        for number in (num_matched, num_held):
            if number:
                self._held[pages[number - 1]].ends_node = True
        if self._victims.splits and self._has_evicted:
            for number in splits(num_matched, num_held, least_stretch(self._capacity)):
                held = self._held[pages[number - 1]]
                held.ends_node = held.is_split = True
        return num_held

    def _offer(self, page: Page) -> None:
        held = self._held[page]
        if not held.num_children and not held.num_locks:
            heapq.heappush(self._leaves, (held.used_at, page))

    def _evict(self, num_pages: int) -> None:
        named: dict[Page, int] = {}

        def next_oldest() -> Page | None:
            while self._leaves:
                used_at, page = heapq.heappop(self._leaves)
                held = self._held.get(page)
                stays = held is None or held.num_children or held.num_locks or held.used_at != used_at
                if not stays and page not in named:
                    named[page] = used_at
                    return page
            return None

        def put_back() -> None:
            for page, used_at in named.items():
                if page in self._held:
                    heapq.heappush(self._leaves, (used_at, page))
            named.clear()

        how, self._has_evicted = self._victims, True
        if how.looks is not None:
            num_pages = max(num_pages, at_once(self._capacity))
        walk = Walk(
            next_oldest,
            put_back,
            how.look,
            how.looks or Looks(),
            uncovers=lambda page: self._has_uncovered,
            near=how.near,
        )
        while num_pages > 0 and (leaf := walk.choose()) is not None:
            num_gone = self._take(leaf.node)
            if how.looks is not None:
                how.looks.earn(num_gone)
            num_pages -= num_gone
        put_back()

    def _take(self, page: Page) -> int:
        """Evict a leaf, that is a node; how many pages went."""
        num_gone, self._has_uncovered = 0, False
        while True:
            parent = self._held.pop(page).parent
            num_gone += 1
            self._gone(page)
            if parent is None:
                return num_gone
            held = self._held[parent]
            held.num_children -= 1
            if held.num_children or held.num_locks:
                return num_gone
            if held.ends_node:
                self._offer(parent)
                self._has_uncovered = held.is_split
                return num_gone
            page = parent
