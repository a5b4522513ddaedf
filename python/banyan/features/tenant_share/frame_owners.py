# SPDX-License-Identifier: Apache-2.0
"""Whose frames are whose in one part of the arena, who has more than a share of them, and which of an owner's goes
next: pure.

Invariants
  1. A frame that is used, filling or resident, has exactly one owner, and is counted once.
  2. Resident frames are queued or set aside, each with its owner's; of two queued frames, of whatever owners, the one
     with the smaller turn is examined first, as in the residency's own order, and so it is of two that are set aside.
  3. ``NOBODY`` has no share: what nobody owns is always above it.

An owner is there while it has a frame, so there are never more owners than frames; above their shares are fewer than
1 / share, and ``NOBODY``. One thread.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter

NOBODY = ""

Turns = defaultdict[str, OrderedDict[int, int]]
"""By owner: frame -> turn."""


class FrameOwners:
    """Of a part with ``num_frames``, of which each owner may have ``share`` while others want room."""

    def __init__(self, share: float, num_frames: int) -> None:
        self._share = share
        self._owner_of: dict[int, str] = {}
        self._num_used: Counter[str] = Counter()
        self.queued: Turns = defaultdict(OrderedDict)
        self.aside: Turns = defaultdict(OrderedDict)
        self._last_turn = self._first_turn = 0
        self._above: set[str] = set()
        self.resize(num_frames)

    def resize(self, num_frames: int) -> None:
        """The part has so many frames now."""
        self.most_of_owner = int(self._share * num_frames)
        for owner in self._num_used:
            self._judge(owner)

    def room(self, owner: str) -> int:
        """How many frames more it takes until the owner has its share; below 0: it has more."""
        return (self.most_of_owner if owner != NOBODY else 0) - self._num_used[owner]

    # ---- frames come and go ------------------------------------------------------------------------------------

    def take(self, owner: str, frames: Sequence[int]) -> None:
        """Free frames are to be filled for it."""
        if frames:
            self._owner_of.update(dict.fromkeys(frames, owner))
            self._num_used[owner] += len(frames)
            self._judge(owner)

    def drop(self, frames: Iterable[int]) -> None:
        """They are used no more."""
        losers = set()
        for frame in frames:
            owner = self._owner_of.pop(frame)
            self._num_used[owner] -= 1
            self._leave(frame, owner)
            losers.add(owner)
        for owner in losers:
            self._judge(owner)
            if not self._num_used[owner]:
                del self._num_used[owner], self.queued[owner], self.aside[owner]

    def queue(self, frames: Iterable[int]) -> None:
        """They are examined last from now on, in this order."""
        self._put_last(frames, self.queued)

    def set_aside(self, frames: Iterable[int]) -> None:
        """They go when nothing else can, the last of those that are set aside."""
        self._put_last(frames, self.aside)

    def _put_last(self, frames: Iterable[int], turns: Turns) -> None:
        for frame in frames:
            owner = self._owner_of[frame]
            self._leave(frame, owner)
            self._last_turn += 1
            turns[owner][frame] = self._last_turn

    def _leave(self, frame: int, owner: str) -> None:
        for turns in (self.queued, self.aside):
            turns[owner].pop(frame, None)

    def advance(self, frame: int) -> None:
        """It is examined first from now on."""
        self._first_turn -= 1
        turns = self.queued[self._owner_of[frame]]
        turns[frame] = self._first_turn
        turns.move_to_end(frame, last=False)

    def _judge(self, owner: str) -> None:
        (self._above.add if self.room(owner) < 0 else self._above.discard)(owner)

    # ---- who goes next -----------------------------------------------------------------------------------------

    def above_share(self, turns: Turns, most: int) -> list[int]:
        """The next to be examined of those who have more than their share, of each as many as that is more."""
        heads = [islice(turns[owner].items(), min(most, -self.room(owner))) for owner in self._above]
        merged = heapq.merge(*heads, key=itemgetter(1))
        return [frame for frame, _ in islice(merged, most)]

    def num_above_share(self, turns: Turns) -> int:
        """Frames of those who have more than their share."""
        return sum(len(turns[owner]) for owner in self._above)

    def of(self, turns: Turns, owner: str, most: int) -> list[int]:
        """The next of its own to be examined."""
        return list(islice(turns.get(owner, ()), most))

    def num_of(self, turns: Turns, owner: str) -> int:
        """Its frames."""
        return len(turns.get(owner, ()))
