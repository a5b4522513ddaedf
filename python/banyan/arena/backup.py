# SPDX-License-Identifier: Apache-2.0
"""From the pool to the arena: every page of this rank's tree is copied down, once for the node.

Invariants
  1. A page that any rank's part of the arena holds, or that is on its way from here, is passed over.
  2. A copy leases the pages it reads like a peer's copy does, so SGLang may free them meanwhile.
  3. What is offered is queued until the next poll, and sent then in one copy: to wake the copy thread takes longer
     than all else. No more than ``max_pages`` are on their way; the rest stays queued. Nothing waits. What has left
     the pool by then, and what is more than ``MAX_QUEUED_PAGES``, is dropped and counted: what comes, but first what
     waits in front for an owner without frames. What found no frame goes behind the others, which wait with it: one
     look walks past all that is held once. Where frames are there for one owner and not for another, only those of the
     same owner wait with it. The queue is looked at again once a frame is free, with the next offer, and every
     ``LOOK_AGAIN_S``: nobody tells when a page can be evicted again.
  4. No page takes a frame from those of its own chain that come before it, as far as the chain was offered together.

A page: queued -> copying -> resident, or passed over, or dropped. One thread calls; the copies have their own.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from banyan.arena.residency import Residency
from banyan.ports import Copy, Lease, Match, Peers
from banyan.telemetry import Counters

MAX_QUEUED_PAGES = 1 << 16
"""Names remembered of pages that wait for their turn: a few megabytes."""

MOST_PASSED_OVER = 1024
"""Chains that one look passes over, since their owners had no frame: the scheduler waits."""

MOST_WITHOUT_FRAMES = 16
"""Owners that one look tries in vain: each may walk the whole arena for a page that can go."""

LOOK_AGAIN_S = 1.0
"""A look takes two lookups for each chain that waits: not in every step."""


class _Queued(msgspec.Struct, frozen=True):
    """Pages of a chain, ``behind`` others of it that stay where they are."""

    keys: Sequence[str]
    behind: Sequence[str]


class _Sent(msgspec.Struct, frozen=True):
    """Pages of a chain with the frames that they land in."""

    keys: Sequence[str]
    frames: list[int]


class _Moving(msgspec.Struct, frozen=True):
    chains: Sequence[_Sent]
    copy: Copy


class Landed(msgspec.Struct, frozen=True):
    """Pages that have just become resident, in the order of their prefix."""

    keys: Sequence[str]
    frames: Sequence[int]


class Backup:
    """Copies pages of one rank down.

    Args:
        peers: finds and leases pages of this node's frame tables; its copies land in this rank's part of the arena.
        pool_slot: the rank table slot of this rank's pool.
        arena_slots: the slots of all parts of the arena.
        max_pages: bound on the pages that are on their way.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        peers: Peers,
        pool_slot: int,
        arena_slots: Sequence[int],
        max_pages: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residency = residency
        self._peers = peers
        self._pool_slots = [pool_slot]
        self._arena_slots = list(arena_slots)
        self._max_pages = max_pages
        self._counters = counters
        self._clock = clock
        self._moving: deque[_Moving] = deque()
        self._on_their_way: set[str] = set()
        self._queue: deque[_Queued] = deque()
        self._num_queued = 0
        self._without_frames: set[str] = set()
        """Owners that the last look at the queue tried in vain."""
        self._has_news = False
        """Since the last look at the queue something was offered or has landed: there may be something to send."""
        self._look_again_s = clock()

    def offer(self, keys: Sequence[str]) -> None:
        """A chain of pages that this rank's pool has just published."""
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

    def poll(self) -> list[Landed]:
        """Publish what has landed since the last call, and send what is queued. Never blocks."""
        landed: list[Landed] = []
        while self._moving and self._moving[0].copy.has_ended:
            landed += self._land(self._moving.popleft())
            self._has_news = True
        if self._may_have_room():
            self._has_news = False
            self._send()
            self._look_again_s = self._clock() + LOOK_AGAIN_S
        return landed

    def _may_have_room(self) -> bool:
        """Whether to look at the queue."""
        if not self._queue:
            return False
        return self._has_news or self._residency.num_free > 0 or self._clock() >= self._look_again_s

    def _send(self) -> None:
        """What is queued, the oldest first, as far as there is room, in one copy."""
        loads: list[tuple[Lease, array[int]]] = []
        sent: list[_Sent] = []
        try:
            self._lease(loads, sent)
            if loads:
                self._moving.append(_Moving(sent, self._peers.start_copy(loads)))
        except BaseException:
            # Nothing has been begun; whatever it is, what keeps it to itself would run out of frames.
            for lease, _ in loads:
                lease.release()
            self._give_up(sent)
            raise

    def _lease(self, loads: list[tuple[Lease, array[int]]], sent: list[_Sent]) -> None:
        """What one copy is to bring; all that is claimed for it is in ``sent``."""
        self._without_frames = without_frames = set[str]()
        num_passed = 0
        for _ in range(len(self._queue)):
            if len(self._on_their_way) >= self._max_pages or num_passed >= MOST_PASSED_OVER:
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
                owner = self._residency.owner_of(chain.keys)
                if owner is None:
                    break
                without_frames.add(owner)
                if len(without_frames) == MOST_WITHOUT_FRAMES:
                    break
                continue
            sent.append(moved)
            lease = self._peers.lease(found, moved.keys)
            if lease is None:
                sent.pop()
                self._counters.backups_dropped_pages += len(moved.keys)
                self._residency.abandon(moved.frames)
                continue
            loads.append((lease, array("q", moved.frames)))
            self._on_their_way.update(moved.keys)

    def _give_up(self, sent: Iterable[_Sent]) -> None:
        """They have not come."""
        self._counters.backups_failed += 1
        for chain in sent:
            self._on_their_way.difference_update(chain.keys)
            self._residency.abandon(chain.frames)

    def _claimed(self, chain: _Queued) -> tuple[Match, _Sent] | None:
        """What the pool holds of the chain, with frames for as much as there is room for; the rest is queued again.
        None where nothing is to be copied."""
        num_present = self._num_present(chain.keys)
        keys, behind = chain.keys[num_present:], [*chain.behind, *chain.keys[:num_present]]
        found = self._peers.lookup(keys, self._pool_slots)
        self._counters.backups_dropped_pages += len(keys) - found.num_pages
        if not found.num_pages:
            return None
        room = min(found.num_pages, self._max_pages - len(self._on_their_way))
        frames = self._residency.claim(room, behind, keys)
        moved = keys[: len(frames)]
        if len(frames) < found.num_pages:
            self._enqueue(_Queued(keys[len(frames) : found.num_pages], [*behind, *moved]))
        return found, _Sent(moved, frames)

    def _num_present(self, keys: Sequence[str]) -> int:
        """Leading pages that need no copy. A chain has no holes: a page is never evicted before its children."""
        num_present = self._num_in_arena(keys)
        while num_present < len(keys) and keys[num_present] in self._on_their_way:
            num_present += 1
        return num_present

    def _num_in_arena(self, keys: Sequence[str]) -> int:
        """Leading pages that some part of the arena has."""
        if len(self._arena_slots) > 1:
            return self._peers.lookup(keys, self._arena_slots).num_pages
        num_present = 0
        while num_present < len(keys) and self._residency.frame(keys[num_present]) is not None:
            num_present += 1
        return num_present

    def _land(self, moving: _Moving) -> list[Landed]:
        for chain in moving.chains:
            self._on_their_way.difference_update(chain.keys)
        if not moving.copy.finish():
            self._give_up(moving.chains)
            return []
        return [landed for chain in moving.chains if (landed := self._published(chain)).keys]

    def _published(self, chain: _Sent) -> Landed:
        # Another rank may have been as quick with the same pages: one copy is enough for the node.
        num_twice = self._num_in_arena(chain.keys)
        self._residency.abandon(chain.frames[:num_twice])
        keys, frames = chain.keys[num_twice:], chain.frames[num_twice:]
        self._residency.publish(frames, keys)
        self._counters.backed_up_pages += len(keys)
        return Landed(keys, frames)

    def quiesce(self) -> None:
        """Wait for what is on its way and forget it."""
        for moving in self._moving:
            moving.copy.finish()
            for chain in moving.chains:
                self._residency.abandon(chain.frames)
        self._moving.clear()
        self._on_their_way.clear()
        self._queue.clear()
        self._num_queued = 0
