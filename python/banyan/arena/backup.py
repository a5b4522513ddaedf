# SPDX-License-Identifier: Apache-2.0
"""From the pool to the arena: every page of this rank's tree is copied down, once for the node.

When that happens has SGLang's names. At first it is write-through: as soon as a page is complete, so that it is there
before it leaves. That is for those who cannot tell that it will. Where somebody tells (``WriteBack``) a page that lies
in the pool takes no other one's frame.

Invariants
  1. A page that any rank's part of the arena holds, or that is on its way from here, is passed over.
  2. What is offered is queued until the next poll, and sent then in few copies: to wake the copy thread takes
     longer than all else. It makes no more than ``max_pages`` be on their way (what leaves the pool is not
     counted); the rest stays queued. Nothing waits. What has left the pool by then, and what is more than
     ``MAX_QUEUED_PAGES``, is dropped and counted: what comes, but first what waits in front for an owner without
     frames. What found no frame goes behind the others, which wait with it: one look walks past all that is held
     once. Where frames are there for one owner and not for another, only those of the same owner wait with it. The
     queue is looked at again once a frame is free, with the next offer, and every ``LOOK_AGAIN_S``: nobody tells
     when a page can be evicted again.
  3. No page takes a frame from those of its own chain that come before it, as far as the chain was offered together.
  4. With write-back what is offered takes free frames only; the rest is dropped, uncounted, for it goes when it leaves.

A page: queued -> on its way (``BackupCopies``), or passed over, or dropped. One thread calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from banyan import faults
from banyan.arena.backup_copies import BackupCopies, Placed
from banyan.arena.duplicates import Duplicates
from banyan.arena.residency import Residency
from banyan.arena.write_back import WriteBack
from banyan.ports import Match, Peers
from banyan.telemetry import Counters

MAX_QUEUED_PAGES = 1 << 16
"""Names remembered of pages that wait for their turn: a few megabytes."""

MOST_PASSED_OVER = 1024
"""Chains that one look passes over, since their owners had no frame: the scheduler waits."""

MOST_WITHOUT_FRAMES = 16
"""Owners that one look tries in vain: each may walk the whole arena for a page that can go."""

COPIES = 4
"""Of what may be on its way at once: the pool gets the pages of each back when it has ended."""

LOOK_AGAIN_S = 1.0
"""A look takes two lookups for each chain that waits: not in every step."""


class _Queued(msgspec.Struct, frozen=True):
    """Pages of a chain, ``behind`` others of it that stay where they are."""

    keys: Sequence[str]
    behind: Sequence[str]


class Backup:
    """Copies pages of one rank down.

    Args:
        peers: finds and leases pages of this node's frame tables; its copies land in this rank's part of the arena.
        pool_slot: the rank table slot of this rank's pool.
        pool_slots: those of all pools.
        arena_slots: those of all parts of the arena, the own one first.
        max_pages: bound on the pages that are on their way.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        peers: Peers,
        pool_slot: int,
        pool_slots: Sequence[int],
        arena_slots: Sequence[int],
        max_pages: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residency = residency
        self._max_pages = max_pages
        self._counters = counters
        self._clock = clock
        self._copies = BackupCopies(
            residency=residency,
            peers=peers,
            pool_slot=pool_slot,
            arena_slots=arena_slots,
            pages_a_copy=max(1, max_pages // COPIES),
            counters=counters,
        )
        duplicates = Duplicates(residency, peers, pool_slots, arena_slots[1:])
        self.write_back = WriteBack(residency, self._copies, duplicates, counters)
        self._queue: deque[_Queued] = deque()
        self._num_queued = 0
        self._without_frames: set[str] = set()
        """Owners that the last look at the queue tried in vain."""
        self._has_news = False
        """Since the last look at the queue something was offered or has landed: there may be something to send."""
        self._look_again_s = clock()

    def offer(self, keys: Sequence[str]) -> None:
        """A chain of pages that this rank's pool has just published."""
        if self.write_back.is_on:
            # They lie in the pool: who needs a frame takes theirs first.
            self._residency.demote(keys)
            if not self._residency.num_free:
                return
        self._enqueue(_Queued(keys, ()))
        self._has_news = True

    def _enqueue(self, chain: _Queued) -> None:
        if self._residency.owner_of(chain.keys) not in self._without_frames:
            self._make_way(len(chain.keys))
        keys = chain.keys[: MAX_QUEUED_PAGES - self._num_queued]
        self._counters.backups_dropped_pages += len(chain.keys) - len(keys)
        if keys:
            self._queue.append(_Queued(keys, chain.behind))
            self._num_queued += len(keys)

    def _make_way(self, num_pages: int) -> None:
        """Of chains in front whose owners have no frames."""
        while self._queue and self._num_queued + num_pages > MAX_QUEUED_PAGES:
            if self._residency.owner_of(self._queue[0].keys) not in self._without_frames:
                return
            num_dropped = len(self._queue.popleft().keys)
            self._num_queued -= num_dropped
            self._counters.backups_dropped_pages += num_dropped

    def poll(self) -> list[Placed]:
        """Publish what has landed since the last call, and send what is queued. Never blocks."""
        landed: list[Placed] = []
        self._try(self.write_back.send)
        while self._copies.has_ended:
            landed += self._copies.land()
            self._has_news = True
        for chain in landed:
            self.write_back.landed(chain.keys)
        if self._may_have_room():
            self._has_news = False
            self._try(self._send_queued)
            self._look_again_s = self._clock() + LOOK_AGAIN_S
        return landed

    def _may_have_room(self) -> bool:
        """Whether to look at the queue."""
        if not self._queue:
            return False
        return self._has_news or self._residency.num_free > 0 or self._clock() >= self._look_again_s

    def _try(self, send: Callable[[], None]) -> None:
        try:
            send()
        except BaseException as error:  # noqa: BLE001 - whatever it is, what has landed and what is read goes on
            # What has not begun is let go: who kept it to himself would run out of frames.
            self._counters.backups_failed += 1
            self._copies.let_go()
            faults.note("backup.send", error)

    def _send_queued(self) -> None:
        """What is queued, the oldest first, as far as there is room."""
        self._lease_queued()
        self._copies.send()

    def _lease_queued(self) -> None:
        self._without_frames = without_frames = set[str]()
        num_passed = 0
        for _ in range(len(self._queue)):
            if self._copies.num_on_their_way >= self._max_pages or num_passed >= MOST_PASSED_OVER:
                break
            if without_frames and self._residency.owner_of(self._queue[0].keys) in without_frames:
                self._queue.rotate(-1)
                num_passed += 1
                continue
            chain = self._queue.popleft()
            self._num_queued -= len(chain.keys)
            claimed = self._claimed(chain)
            if claimed is None:
                continue
            found, moved = claimed
            if not moved.frames:
                if self.write_back.is_on:
                    self._forget_queued()
                    break
                owner = self._residency.owner_of(chain.keys)
                if owner is None:
                    break
                without_frames.add(owner)
                if len(without_frames) == MOST_WITHOUT_FRAMES:
                    break
                continue
            self._copies.take(found, moved)

    def _claimed(self, chain: _Queued) -> tuple[Match, Placed] | None:
        """What the pool holds of the chain, with frames for as much as there is room for; the rest is queued again.
        None where nothing is to be copied."""
        num_present = self._copies.num_present(chain.keys)
        keys, behind = chain.keys[num_present:], [*chain.behind, *chain.keys[:num_present]]
        found = self._copies.in_pool(keys)
        self._counters.backups_dropped_pages += len(keys) - found.num_pages
        if not found.num_pages:
            return None
        room = min(found.num_pages, self._max_pages - self._copies.num_on_their_way)
        if self.write_back.is_on:
            room = min(room, self._residency.num_free)
        frames = self._residency.claim(room, behind, keys)
        moved = keys[: len(frames)]
        if len(frames) < found.num_pages and (not self.write_back.is_on or self._residency.num_free):
            self._enqueue(_Queued(keys[len(frames) : found.num_pages], [*behind, *moved]))
        return found, Placed(moved, frames)

    def quiesce(self) -> None:
        """Wait for what is on its way and forget it."""
        self._copies.quiesce()
        self._forget_queued()

    def _forget_queued(self) -> None:
        self._queue.clear()
        self._num_queued = 0
