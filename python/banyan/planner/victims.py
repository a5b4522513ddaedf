# SPDX-License-Identifier: Apache-2.0
"""Which leaf of a full pool goes: the one with the least expected reload cost, among those that are looked at.

The expected reload cost of a page is the cost to reload it times the probability of its reuse. The cost is measured: a
copy out of a peer's pool or the arena, against a computation. The probability is learnt (``banyan._native.Demand``). So
duplicates go before last copies as long as copying is much quicker, and a scan goes before a hot set.

The oldest leaves are always looked at. While none of them is a duplicate, others are looked at too, as many as are paid
for by the pages that have gone before. A walk for one page looks at nearly as many leaves as one for twenty, so some
more go at once (``at_once``).

Invariants
  1. Only leaves that the tree offers are chosen, each at most once in a walk.
  2. A leaf is looked at once in a walk. Over all walks no more leaves are looked at than one and a half times
     ``NEAR_LEAVES`` for each walk, one for each leaf that goes, and ``LOOKS_PER_PAGE`` for each page that goes.

States of a walk: fresh -> choosing -> over. The tree offers leaves oldest first; when it has none left although more is
to go, the walk asks it to begin again: parents of leaves that have gone are leaves then. It does so at once where the
parent is known to be the stretch before (``banyan.planner.stretches``), which is as old: else the walk would take a
stretch of every run that it sees before it takes a second one of the oldest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import msgspec

from banyan.core import SourceKind
from banyan.planner.stretches import least_stretch

NEAR_LEAVES = 16
"""Looked at before an eviction, whatever it takes."""

LOOKS_PER_PAGE = 0.4
"""A look takes some 3.5 us, most of it SGLang's own: 1.4 us for each page that goes. See docs/design/0014."""

MOST_AT_ONCE = 64
"""Pages that go in a walk for fewer: 3 ms of the scheduler thread where each is a leaf, nearly all of it SGLang's."""

MOST_LOOKS = 512
"""Saved up: 2 ms of the scheduler thread in one walk."""

COPIES = (SourceKind.PEER, SourceKind.HOST)
"""Where else a page of a pool can lie, as far as this is asked for."""

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
        self._shares: dict[SourceKind | None, float] = {None: 1.0, **dict.fromkeys(COPIES, UNMEASURED_SHARE)}

    def refresh(self) -> None:
        """Take what was measured meanwhile."""
        now_s = self._clock()
        if now_s >= self._refresh_at_s:
            self._refresh_at_s = now_s + REFRESH_S
            self._shares.update({kind: self._share(kind) for kind in COPIES})

    def reload_costs(self, copies: Sequence[SourceKind | None], probabilities: Sequence[float]) -> list[float]:
        """The expected reload cost of each page. A last copy has a share of 1.0, and any where copying is no quicker
        than computing."""
        shares = self._shares
        return [shares[copy] * chance for copy, chance in zip(copies, probabilities, strict=True)]

    def _share(self, kind: SourceKind) -> float:
        share = self._measured(kind)
        return UNMEASURED_SHARE if share is None else min(1.0, max(LEAST_SHARE, share))


def at_once(num_frames: int) -> int:
    """Pages that go at once, at least, from a pool of ``num_frames``: no more of it than a stretch is."""
    return min(MOST_AT_ONCE, least_stretch(num_frames))


class Leaf(msgspec.Struct, frozen=True):
    """``key``: of the page that it ends with; ``copy``: where else that page lies, None for the node's last copy;
    ``reload_cost``: the cost to reload that page, over computing it, times the probability of its reuse."""

    node: int
    key: str
    copy: SourceKind | None
    reload_cost: float


@dataclass(slots=True)
class Looks:
    """How many leaves may be looked at beyond the nearest."""

    num_saved: float = 0.0

    def earn(self, num_pages: int) -> None:
        """So many pages have gone."""
        num_saved = self.num_saved + LOOKS_PER_PAGE * num_pages
        self.num_saved = num_saved if num_saved < MOST_LOOKS else MOST_LOOKS

    def spend(self, num_looks: int) -> bool:
        """Take so many; False, and none, when fewer are left."""
        if self.num_saved < num_looks:
            return False
        self.num_saved -= num_looks
        return True


class Walk:
    """One eviction, leaf by leaf.

    Args:
        next_oldest: the tree's next leaf; None when it has none left, or enough has gone.
        begin_again: have the tree offer its leaves anew.
        look: at leaves.
        looks: of all walks of the tree.
        uncovers: whether the stretch before a leaf that has gone is a leaf now.
    """

    def __init__(
        self,
        next_oldest: Callable[[], int | None],
        begin_again: Callable[[], None],
        look: Callable[[Sequence[int]], Sequence[Leaf]],
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
        self._num_at_hand = near
        # A look alone takes several times as long as one of eight. So the number at hand goes up and down.
        self._batch = max(1, near // 2)
        self._least = near - self._batch // 2
        self._leaves: list[tuple[float, int, Leaf]] = []
        self._seen: dict[int, Leaf] = {}
        self._num_named = self._num_duplicates = self._num_taken = 0
        self._chosen: Leaf | None = None

    def choose(self) -> Leaf | None:
        """The leaf to evict now; None when nothing is left. Of equal ones the oldest. The one before has gone."""
        if self._chosen is not None and self._uncovers(self._chosen.node):
            self._start_over()
        leaves = self._leaves
        # Asked here and not there: a call takes as long as all else, and mostly nothing is to be done.
        if len(leaves) < self._num_at_hand or (not self._num_duplicates and self._looks.num_saved >= self._batch):
            self._fill()
        if not leaves:
            if not self._num_taken:
                return None
            self._start_over()
            self._fill()
            if not leaves:
                return None
        _, _, chosen = heappop(leaves)
        if chosen.copy is not None:
            self._num_duplicates -= 1
        self._num_taken += 1
        self._chosen = chosen
        return chosen

    def _start_over(self) -> None:
        self._begin_again()
        # Those that were looked at with looks that were paid for stay in view.
        self._num_at_hand = max(self._least, len(self._leaves) + 1)
        self._leaves.clear()
        self._num_duplicates = self._num_taken = 0

    def _fill(self) -> None:
        is_more, num_wanted = True, self._num_at_hand - len(self._leaves)
        if num_wanted > 0:
            is_more = self._see(max(num_wanted, self._batch))
        while is_more and not self._num_duplicates and self._looks.spend(self._batch):
            is_more = self._see(self._batch)
        self._num_at_hand = self._least

    def _see(self, num_leaves: int) -> bool:
        """Look at so many more leaves; False when there are no more."""
        seen = self._seen
        nodes = list(islice(iter(self._next_oldest, None), num_leaves))
        if new := [node for node in nodes if node not in seen]:
            seen.update(zip(new, self._look(new), strict=True))
        for number, leaf in enumerate(map(seen.__getitem__, nodes), self._num_named):
            heappush(self._leaves, (leaf.reload_cost, number, leaf))
            if leaf.copy is not None:
                self._num_duplicates += 1
        self._num_named += len(nodes)
        return len(nodes) == num_leaves
