# SPDX-License-Identifier: Apache-2.0
"""From the pool to the arena: every page of this rank's tree is copied down, once for the node.

When that happens has SGLang's names. At first it is write-through: as soon as a page is complete. After ``write_back``
a page takes no other one's frame before it leaves the pool (``leaving``): until then it would lie twice, and the node
would hold less. Write-through, so that a page is there before it leaves, is for those who cannot tell that it will.

Invariants
  1. A page that any rank's part of the arena holds, or that is on its way from here, is passed over.
  2. A copy leases the pages it reads like a peer's copy does, so SGLang may free them meanwhile.
  3. What is offered is queued until the next poll, and sent then in one copy: to wake the copy thread takes longer than
     all else. It makes no more than ``max_pages`` be on their way; the rest stays queued. Nothing waits. What has left
     the pool by then, and what is more than ``MAX_QUEUED_PAGES``, is dropped and counted: what comes, but first what
     waits in front for an owner without frames. What found no frame goes behind the others, which wait with it: one
     look walks past all that is held once. Where frames are there for one owner and not for another, only those of the
     same owner wait with it. The queue is looked at again once a frame is free, with the next offer, and every
     ``LOOK_AGAIN_S``: nobody tells when a page can be evicted again.
  4. No page takes a frame from those of its own chain that come before it, as far as the chain was offered together.
  5. With write-back what is offered takes free frames only; the rest is dropped, uncounted, for it goes when it leaves.
     What leaves is leased when that is said, before the pool hands its pages out, and sent with the next ``send``; it
     counts as on its way at once.

A page: queued -> leased -> copying -> resident, or passed over, or dropped. One thread calls; the copies have their
own.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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
        self._leased: list[tuple[Lease, _Sent]] = []
        """What the next copy is to bring."""
        self.is_write_back = False
        self.has_room = True
        """Whether what has left last has found frames."""
        self._may_have_frames = True
        """As far as is known since the last ``send``: each try may walk the whole arena for a page that can go."""
        self._queue: deque[_Queued] = deque()
        self._num_queued = 0
        self._without_frames: set[str] = set()
        """Owners that the last look at the queue tried in vain."""
        self._has_news = False
        """Since the last look at the queue something was offered or has landed: there may be something to send."""
        self._look_again_s = clock()

    def write_back(self) -> None:
        """From now on whoever takes pages out of the pool says ``leaving`` before."""
        self.is_write_back = True

    def write_through(self) -> None:
        """From now on nobody does."""
        self.is_write_back = False

    @property
    def is_copying(self) -> bool:
        """Whether a copy is on its way. It ends by itself."""
        return any(not moving.copy.has_ended for moving in self._moving)

    def offer(self, keys: Sequence[str]) -> None:
        """A chain of pages that this rank's pool has just published."""
        if self.is_write_back:
            # They lie in the pool: who needs a frame takes theirs first.
            self._residency.demote(keys)
            if not self._residency.num_free:
                return
        self._enqueue(_Queued(keys, ()))
        self._has_news = True

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
        in_arena = self._peers.lookup(keys, self._arena_slots)
        # It was to go first, while it lay in the pool as well.
        self._peers.touch(in_arena)
        num_present = self._and_coming(keys, in_arena.num_pages)
        keys, behind = keys[num_present:], keys[:num_present]
        if not keys:
            return True
        found = self._peers.lookup(keys, self._pool_slots)
        frames: list[int] = []
        if self._may_have_frames:
            frames = self._residency.claim(found.num_pages, behind, keys)
            self.has_room = self._may_have_frames = len(frames) == found.num_pages
        self._counters.backups_dropped_pages += len(keys) - len(frames)
        moved = _Sent(keys[: len(frames)], frames)
        return bool(frames) and self._take(found, moved) and len(frames) == len(keys)

    def send(self) -> None:
        """Start to copy what is leased."""
        self._may_have_frames = True
        if self._leased:
            chains = [chain for _, chain in self._leased]
            loads = [(lease, array("q", chain.frames)) for lease, chain in self._leased]
            self._moving.append(_Moving(chains, self._peers.start_copy(loads)))
            self._leased = []

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
        self._try(self.send)
        while self._moving and self._moving[0].copy.has_ended:
            landed += self._land(self._moving.popleft())
            self._has_news = True
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
        except BaseException:
            # Nothing has been begun; whatever it is, what keeps it to itself would run out of frames.
            self._counters.backups_failed += 1
            self.let_go()
            raise

    def let_go(self) -> None:
        """Of what is leased and not sent: nobody will."""
        for lease, _ in self._leased:
            lease.release()
        self._give_up([chain for _, chain in self._leased])
        self._leased = []

    def _send_queued(self) -> None:
        """What is queued, the oldest first, as far as there is room, in one copy."""
        self._lease_queued()
        self.send()

    def _lease_queued(self) -> None:
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
                if self.is_write_back:
                    self._forget_queued()
                    break
                owner = self._residency.owner_of(chain.keys)
                if owner is None:
                    break
                without_frames.add(owner)
                if len(without_frames) == MOST_WITHOUT_FRAMES:
                    break
                continue
            self._take(found, moved)

    def _take(self, found: Match, moved: _Sent) -> bool:
        """Lease pages of the pool for the next copy; whether they were still there."""
        lease = None
        try:
            lease = self._peers.lease(found, moved.keys)
        finally:
            if lease is None:
                self._residency.abandon(moved.frames)
        if lease is None:
            self._counters.backups_dropped_pages += len(moved.keys)
            return False
        self._leased.append((lease, moved))
        self._on_their_way.update(moved.keys)
        return True

    def _give_up(self, sent: Iterable[_Sent]) -> None:
        """They have not come."""
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
        if self.is_write_back:
            room = min(room, self._residency.num_free)
        frames = self._residency.claim(room, behind, keys)
        moved = keys[: len(frames)]
        if len(frames) < found.num_pages and (not self.is_write_back or self._residency.num_free):
            self._enqueue(_Queued(keys[len(frames) : found.num_pages], [*behind, *moved]))
        return found, _Sent(moved, frames)

    def _num_present(self, keys: Sequence[str]) -> int:
        """Leading pages that need no copy. A chain has no holes: a page is never evicted before its children."""
        return self._and_coming(keys, self._num_in_arena(keys))

    def _and_coming(self, keys: Sequence[str], num_present: int) -> int:
        """Those that are there, and those behind them that are on their way."""
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
            self._counters.backups_failed += 1
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
        self.let_go()
        for moving in self._moving:
            moving.copy.finish()
            for chain in moving.chains:
                self._residency.abandon(chain.frames)
        self._moving.clear()
        self._on_their_way.clear()
        self._forget_queued()

    def _forget_queued(self) -> None:
        self._queue.clear()
        self._num_queued = 0
