# SPDX-License-Identifier: Apache-2.0
"""Write-back, in SGLang's words: what nobody else has goes down to the arena when it leaves the pool, not before. Until
then it would lie twice, and the node would hold less.

Invariants
  1. It is on while whoever takes pages out of the pool says ``leaving`` before: off --begin--> on --end--> off. Who
     takes them out says so, and nobody else.
  2. What leaves is leased when that is said, before the pool hands its pages out, and sent with the next ``send``; it
     counts as on its way at once.
  3. Of one chain no page takes the frame of one before it. What finds no frame is dropped and counted; nothing waits.
  4. Between two ``send`` no frame is claimed after a claim that found too few.

The scheduler's thread calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from banyan.arena.backup_copies import BackupCopies, Placed
from banyan.arena.duplicates import Duplicates
from banyan.arena.residency import Residency
from banyan.telemetry import Counters


class WriteBack:
    def __init__(self, residency: Residency, copies: BackupCopies, duplicates: Duplicates, counters: Counters) -> None:
        self._residency = residency
        self._copies = copies
        self._duplicates = duplicates
        self._counters = counters
        self._is_on = False
        self.has_room = True
        """Whether what has left last has found frames that nothing was lost for."""
        self._may_have_frames = True
        """As far as is known since the last ``send``: each try may walk the whole arena for a page that can go."""

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def is_copying(self) -> bool:
        """Whether a copy is on its way. It ends by itself."""
        return self._copies.is_copying

    def begin(self) -> None:
        """From now on whoever takes pages out of the pool says ``leaving`` before."""
        self._is_on = True

    def end(self) -> None:
        """From now on nobody does, nor sends what is leased."""
        self._copies.let_go()
        self._is_on = False

    @contextmanager
    def sparing(self, keys: Sequence[str]) -> Iterator[None]:
        """Meanwhile nothing that comes down takes the frames of these pages."""
        frames = [frame for key in keys if (frame := self._residency.frame(key)) is not None]
        self._residency.hold(frames)
        try:
            yield
        finally:
            self._residency.unhold(frames)

    def leaving(self, keys: Sequence[str]) -> bool:
        """The pool is about to drop a chain of pages that no other pool has; whether all of them stay on the node."""
        stays, behind = True, list[str]()
        self._duplicates.leave(keys)
        # What is there was to go first, while it lay in the pool as well.
        for is_there, run in self._copies.runs(keys):
            if not is_there:
                stays = self._take_down(run, behind) and stays
            behind += run
        return stays

    def _take_down(self, keys: Sequence[str], behind: Sequence[str]) -> bool:
        found = self._copies.in_pool(keys)
        frames: list[int] = []
        if self._may_have_frames:
            frames = self._claimed(found.num_pages, behind, keys)
        self._counters.backups_dropped_pages += len(keys) - len(frames)
        wanted = Placed(keys[: len(frames)], frames)
        return bool(frames) and self._copies.take(found, wanted) and len(frames) == len(keys)

    def _claimed(self, num_pages: int, behind: Sequence[str], keys: Sequence[str]) -> list[int]:
        num_missing = num_pages - self._residency.num_free
        if num_missing > 0:
            self._duplicates.go_first(num_missing)
        frames = self._residency.claim(num_pages, behind, keys)
        self._may_have_frames = len(frames) == num_pages
        self.has_room = self._may_have_frames and self._duplicates.have_all(self._residency.last_evicted)
        return frames

    def landed(self, keys: Sequence[str]) -> None:
        """These pages have come down: they have left the pool, or frames were free."""
        if self._is_on:
            self._duplicates.look_up(keys)

    def send(self) -> None:
        """Start to copy what has left."""
        self._may_have_frames = True
        self._duplicates.have_left()
        self._copies.send()
