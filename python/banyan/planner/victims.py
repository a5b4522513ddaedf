# SPDX-License-Identifier: Apache-2.0
"""Which leaf of a full pool goes: the one whose loss is expected to cost least, among those that are looked at.

The loss of a page is what it costs to have it again, by its chance to be wanted. The cost is measured: a copy out of a
peer's pool or the arena, against a computation. The chance is learnt (``banyan.planner.demand``). So duplicates go
before last copies as long as copying is much quicker, and a scan goes before a hot set.

The oldest leaves are always looked at. While none of them is a duplicate, others are looked at too, as many as are paid
for by the pages that have gone before.

Invariants
  1. Only leaves that the tree offers are chosen, each at most once in a walk.
  2. A leaf is looked at once in a walk. Over all walks no more leaves are looked at than ``NEAR_LEAVES`` for each walk,
     one for each leaf that goes, and ``LOOKS_PER_PAGE`` for each page that goes.

States of a walk: fresh -> choosing -> over. The tree offers leaves oldest first; when it has none left although more is
to go, the walk asks it to begin again: parents of leaves that have gone are leaves then. It does so at once where the
parent is known to be the stretch before (``banyan.planner.stretches``), which is as old: else the walk would take a
stretch of every run that it sees before it takes a second one of the oldest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from banyan.core import SourceKind

NEAR_LEAVES = 16
"""Looked at before an eviction, whatever it takes."""

LOOKS_PER_PAGE = 0.4
"""A look takes some 5 us, half of it SGLang's own: 2 us for each page that goes. See docs/design/0014."""

MOST_LOOKS = 512
"""Saved up: 2.5 ms of the scheduler thread in one walk."""


UNMEASURED_SHARE = 0.02
"""Of a copy whose time is not known yet: much less than computing."""

LEAST_SHARE = 0.001

REFRESH_S = 1.0


class CostShares:
    """What a page costs to have again, over computing it, by where else it lies.

    Args:
        measured: the share of a source; None while it was not measured.
        clock: seconds.
    """

    def __init__(self, measured: Callable[[SourceKind], float | None], clock: Callable[[], float]) -> None:
        self._measured = measured
        self._clock = clock
        self._refresh_at_s = -math.inf
        self._shares: dict[SourceKind, float] = {}

    def refresh(self) -> None:
        """Take what was measured meanwhile."""
        now_s = self._clock()
        if now_s >= self._refresh_at_s:
            self._refresh_at_s = now_s + REFRESH_S
            self._shares = {kind: self._share(kind) for kind in (SourceKind.PEER, SourceKind.HOST)}

    def of(self, copy: SourceKind | None) -> float:
        """1.0 for a last copy, and where copying is no quicker than computing."""
        return 1.0 if copy is None else self._shares.get(copy, UNMEASURED_SHARE)

    def _share(self, kind: SourceKind) -> float:
        share = self._measured(kind)
        return UNMEASURED_SHARE if share is None else min(1.0, max(LEAST_SHARE, share))


class Leaf(NamedTuple):
    """``key``: of the page that it ends with; ``copy``: where else that page lies, None for the node's last copy;
    ``loss``: what that page costs to have again, over computing it, by its chance."""

    node: int
    key: str
    copy: SourceKind | None
    loss: float


@dataclass(slots=True)
class Looks:
    """How many leaves may be looked at beyond the nearest."""

    num_saved: float = 0.0

    def earn(self, num_pages: int) -> None:
        """So many pages have gone."""
        self.num_saved = min(MOST_LOOKS, self.num_saved + LOOKS_PER_PAGE * num_pages)

    def spend(self) -> bool:
        """Take one; False when none is left."""
        if self.num_saved < 1:
            return False
        self.num_saved -= 1
        return True


class Walk:
    """One eviction, leaf by leaf.

    Args:
        next_oldest: the tree's next leaf; None when it has none left, or enough has gone.
        begin_again: have the tree offer its leaves anew.
        look: at a leaf.
        looks: of all walks of the tree.
        uncovers: whether the stretch before a leaf that has gone is a leaf now.
    """

    def __init__(
        self,
        next_oldest: Callable[[], int | None],
        begin_again: Callable[[], None],
        look: Callable[[int], Leaf],
        looks: Looks,
        *,
        uncovers: Callable[[int], bool],
        near: int = NEAR_LEAVES,
    ) -> None:
        self._next_oldest = next_oldest
        self._begin_again = begin_again
        self._look = look
        self._looks = looks
        self._uncovers = uncovers
        self._near = self._num_at_hand = near
        self._leaves: list[tuple[float, int, Leaf]] = []
        self._seen: dict[int, Leaf] = {}
        self._numbers = count()
        self._num_duplicates = self._num_taken = 0
        self._chosen: Leaf | None = None

    def choose(self) -> Leaf | None:
        """The leaf to evict now; None when nothing is left. Of equal ones the oldest. The one before has gone."""
        if self._chosen is not None and self._uncovers(self._chosen.node):
            self._start_over()
        self._fill()
        if not self._leaves and self._num_taken:
            self._start_over()
            self._fill()
        if not self._leaves:
            return None
        _, _, self._chosen = heappop(self._leaves)
        self._num_duplicates -= self._chosen.copy is not None
        self._num_taken += 1
        return self._chosen

    def _start_over(self) -> None:
        self._begin_again()
        # Those that were looked at with looks that were paid for stay in view.
        self._num_at_hand = max(self._near, len(self._leaves) + 1)
        self._leaves.clear()
        self._num_duplicates = self._num_taken = 0

    def _fill(self) -> None:
        leaves, seen = self._leaves, self._seen
        while len(leaves) < self._num_at_hand or (not self._num_duplicates and self._looks.spend()):
            node = self._next_oldest()
            if node is None:
                break
            leaf = seen.get(node)
            if leaf is None:
                leaf = seen[node] = self._look(node)
            heappush(leaves, (leaf.loss, next(self._numbers), leaf))
            if leaf.copy is not None:
                self._num_duplicates += 1
        self._num_at_hand = self._near
