# SPDX-License-Identifier: Apache-2.0
"""Which pages lie where, on one node: in the pool of each rank, and in the host arena.

The pool is the engine's own radix cache, least recently used first and leaves before their parents: SGLang's policy,
not one of Banyan's. The arena's is ``banyan.arena.Residency``, the shipped code, over a shelf that copies nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from banyan.arena.residency import Residency

Page = str


class Pool:
    """Pages in the pool of one rank."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[Page, None] = OrderedDict()

    def prefix(self, pages: Sequence[Page]) -> int:
        """How many leading pages are here."""
        for number, page in enumerate(pages):
            if page not in self._pages:
                return number
        return len(pages)

    def insert(self, pages: Sequence[Page]) -> list[Page]:
        """Put a prompt's pages here, most recently used; the pages that had to go."""
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        gone = []
        while len(self._pages) > self._num_pages:
            gone.append(self._pages.popitem(last=False)[0])
        return gone


class _Shelf:
    """An ``ArenaShelf`` without memory: remembers which frames were leased."""

    def __init__(self) -> None:
        self.touched: set[int] = set()

    def publish(self, frames: Sequence[int], keys: Sequence[str]) -> int:
        return len(frames)

    def retire(self, frames: Sequence[int]) -> bytes:
        return array("q", frames).tobytes()

    def drain(self) -> bytes:
        return b""

    def take_touched(self, frames: Sequence[int]) -> bytes:
        seen = [frame for frame in frames if frame in self.touched]
        self.touched.difference_update(seen)
        return array("q", seen).tobytes()


class Arena:
    """The node's DRAM tier. ``num_pages`` 0: there is none."""

    def __init__(self, num_pages: int) -> None:
        self._shelf = _Shelf()
        self._residency = Residency(self._shelf, num_pages) if num_pages else None

    def prefix(self, pages: Sequence[Page], start: int) -> int:
        """How many leading pages are here if the first ``start`` come from elsewhere; the others count as used."""
        if self._residency is None:
            return 0
        for number in range(start, len(pages)):
            frame = self._residency.frame(pages[number])
            if frame is None:
                return number
            self._shelf.touched.add(frame)
        return len(pages)

    def insert(self, pages: Sequence[Page]) -> None:
        """Back up what is not here, as far as there is room."""
        if self._residency is None:
            return
        new = [page for page in pages if self._residency.frame(page) is None]
        frames = self._residency.claim(len(new))
        self._residency.publish(frames, new[: len(frames)])
