# SPDX-License-Identifier: Apache-2.0
"""Pages of this rank's part of the arena that lie elsewhere on the node as well: with write-back they go first.

What this rank loads it demotes itself, when its pool publishes it. What other ranks load is leased, and a lease marks
its page as wanted. So marked pages are looked up, as many as are paid for by the pages that go down, and demoted where
a pool holds them. What came down while there were free frames lies in this rank's pool, whether it is marked or not: it
is looked up when it lands, and what landed before write-back began the first time round.

Invariants
  1. No page is demoted but one that a pool held a moment ago, and that this rank's pool is not about to drop. A pool
     that drops one says so (``WriteBack.leaving``), and it is wanted again.
  2. For each page that needs a frame the marks of ``LOOKS_PER_PAGE`` frames are read, however large the arena is.

The scheduler's thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from banyan.arena.residency import Residency
from banyan.ports import Peers

LOOKS_PER_PAGE = 8
"""Frames whose marks are read for each page that goes down: 1 to 2 us, and 1 to 5 us for each of them that is marked,
on eight ranks, in a part of 100,000 frames."""


class Duplicates:
    """``pool_slots``: of all pools that say what leaves them; ``other_arena_slots``: of the arena's other parts."""

    def __init__(
        self, residency: Residency, peers: Peers, pool_slots: Sequence[int], other_arena_slots: Sequence[int]
    ) -> None:
        self._residency = residency
        self._peers = peers
        self._pool_slots = list(pool_slots)
        self._elsewhere_slots = [*pool_slots, *other_arena_slots]
        self._hand = 0
        self._is_first_round = True
        self._leaving: set[str] = set()

    def leave(self, keys: Sequence[str]) -> None:
        """This rank's pool is about to drop these pages, and shows them until it has."""
        self._leaving.update(keys)

    def have_left(self) -> None:
        self._leaving.clear()

    def go_first(self, num_pages: int) -> None:
        """So many pages are about to come down and to take the frames of others."""
        residency = self._residency
        frames = range(self._hand, min(self._hand + LOOKS_PER_PAGE * num_pages, residency.num_frames))
        keys = residency.keys_in(frames) if self._is_first_round else residency.wanted_in(frames)
        self._hand = frames.stop
        if self._hand == residency.num_frames:
            self._hand, self._is_first_round = 0, False
        self.look_up(keys)

    def look_up(self, keys: Sequence[str]) -> None:
        """Of these pages of the arena those that a pool holds go next."""
        self._residency.demote(self._held_by(keys, self._pool_slots))

    def have_all(self, keys: Sequence[str]) -> bool:
        """Whether these pages, which the arena has given up, lie elsewhere on the node."""
        return len(self._held_by(keys, self._elsewhere_slots)) == len(keys)

    def _held_by(self, keys: Sequence[str], slots: Sequence[int]) -> list[str]:
        staying = [key for key in keys if key not in self._leaving]
        holders = self._peers.holders(staying, slots) if staying else ()
        return [key for key, holder in zip(staying, holders, strict=True) if holder is not None]
