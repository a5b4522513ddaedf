# SPDX-License-Identifier: Apache-2.0
"""Which leaf of a full pool goes: the least recently used of those that somebody else holds too, within a window.

A page that a peer or the arena also holds costs a copy to have again, the last copy on the node costs a computation. So
among the oldest leaves those with a duplicate go first. Beyond the window age decides: what nobody has asked for in a
long time goes, whoever else holds it.

Invariants
  1. Only leaves that the tree offers are chosen, each at most once in a walk.
  2. A leaf's holders are looked up once in a walk: the cost of a choice is bounded by the window, and of a walk by the
     leaves that it takes plus the window.

States of a walk: fresh -> choosing -> over. The tree offers leaves oldest first; when it has none left although more is
to go, the walk asks it to begin again: parents of leaves that have gone are leaves then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

WINDOW_LEAVES = 16
"""Looked at before an eviction. See docs/design/0014."""


class Leaf(NamedTuple):
    """``is_duplicate``: a peer's pool or the arena holds it as well."""

    node: int
    is_duplicate: bool


class Walk:
    """One eviction, leaf by leaf.

    Args:
        next_oldest: the tree's next leaf; None when it has none left, or enough has gone.
        begin_again: have the tree offer its leaves anew.
        is_duplicate: whether somebody else holds a leaf.
    """

    def __init__(
        self,
        next_oldest: Callable[[], int | None],
        begin_again: Callable[[], None],
        is_duplicate: Callable[[int], bool],
        *,
        window: int = WINDOW_LEAVES,
    ) -> None:
        self._next_oldest = next_oldest
        self._begin_again = begin_again
        self._is_duplicate = is_duplicate
        self._window = window
        self._leaves: list[Leaf] = []
        self._num_taken = 0

    def choose(self) -> Leaf | None:
        """The leaf to evict now; None when nothing is left."""
        self._fill()
        if not self._leaves and self._num_taken:
            self._begin_again()
            self._num_taken = 0
            self._fill()
        if not self._leaves:
            return None
        chosen = next((number for number, leaf in enumerate(self._leaves) if leaf.is_duplicate), 0)
        self._num_taken += 1
        return self._leaves.pop(chosen)

    def _fill(self) -> None:
        while len(self._leaves) < self._window:
            node = self._next_oldest()
            if node is None:
                return
            self._leaves.append(Leaf(node, self._is_duplicate(node)))
