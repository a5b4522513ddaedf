# SPDX-License-Identifier: Apache-2.0
"""Which page leaves a part of the arena where each tenant has a share of it.

Invariants
  1. Free frames are anybody's. Pages make room in this order: those of owners above their share, until they have no
     more than that; then, for a claimant that is below its share and stays there, any; for another, its own.
  2. So no page of an owner that has its share, or less, is evicted for one that then has more.
  3. Among the pages that may go at a step, what the clock would take first goes first. Others keep their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

from banyan.arena.residency import Queue, Residency
from banyan.features.tenant_share.frame_owners import NOBODY, FrameOwners
from banyan.ports import ArenaFrameTable


class SharedResidency(Residency):
    """The frames of one rank's part. ``owner_of``: of a chain of pages, ``NOBODY`` where that is not known."""

    def __init__(
        self,
        frame_table: ArenaFrameTable,
        num_frames: int,
        kept: Collection[str],
        *,
        share: float,
        owner_of: Callable[[Sequence[str]], str],
    ) -> None:
        super().__init__(frame_table, num_frames, kept)
        self._owners = FrameOwners(share, num_frames)
        self._whose = owner_of
        self._claimant = NOBODY

    def grow(self, num_frames: int) -> None:
        super().grow(num_frames)
        self._owners.resize(self.num_frames)

    def adopt(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        """They come from a server of before: nobody knows whose they are."""
        super().adopt(frames, keys)
        self._owners.take(NOBODY, frames)
        self._owners.queue(frames)

    def claim(self, num_frames: int, sparing: Sequence[str] = (), keys: Sequence[str] = ()) -> list[int]:
        """As everywhere; the frames are for the owner of ``keys``."""
        self._claimant = self._whose(keys)
        claimed = super().claim(num_frames, sparing, keys)
        self._owners.take(self._claimant, claimed)
        return claimed

    def owner_of(self, keys: Sequence[str]) -> str:
        return self._whose(keys)

    def publish(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        super().publish(frames, keys)
        # The others were abandoned: their pages were resident already.
        self._owners.queue(frame for frame in reversed(frames) if frame in self._key_of)

    def abandon(self, frames: Sequence[int]) -> None:
        super().abandon(frames)
        self._owners.drop(frames)

    def reset(self) -> None:
        self._owners.drop(self._key_of)
        super().reset()

    def demote(self, keys: Sequence[str]) -> int:
        num_demoted = super().demote(keys)
        for frame in reversed(list(islice(self._queue, num_demoted))):
            self._owners.advance(frame)
        return num_demoted

    def kept_no_more(self, keys: Sequence[str]) -> list[int]:
        frames = super().kept_no_more(keys)
        self._owners.queue(frames)
        return frames

    # ---- what goes ---------------------------------------------------------------------------------------------

    def _choose(self, num_frames: int, victims: list[int], gone: list[str], queue: Queue) -> None:
        owners, claimant = self._owners, self._claimant
        turns = owners.queued if queue is self._queue else owners.aside
        above = partial(owners.above_share, turns)
        self._choose_from(above, owners.num_above_share(turns), num_frames, victims, gone, queue)
        # What it is going to have besides: the free frames, and those of the victims.
        room = owners.room(claimant) - len(self._free) - len(victims)
        if room > 0:
            super()._choose(min(num_frames, len(victims) + room), victims, gone, queue)
        its_own = partial(owners.of, turns, claimant)
        self._choose_from(its_own, owners.num_of(turns, claimant), num_frames, victims, gone, queue)

    def _examine(
        self, candidates: Sequence[int], num_frames: int, victims: list[int], gone: list[str], queue: Queue
    ) -> list[int]:
        num_before = len(victims)
        passed = super()._examine(candidates, num_frames, victims, gone, queue)
        self._owners.drop(victims[num_before:])
        self._owners.queue(frame for frame in passed if frame in self._queue)
        self._owners.set_aside(frame for frame in passed if frame in self._aside)
        return passed
