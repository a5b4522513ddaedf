# SPDX-License-Identifier: Apache-2.0
"""From the pool to the arena: every page of this rank's tree is copied down, once for the node.

Invariants
  1. A page that any rank's part of the arena holds, or that is on its way from here, is passed over.
  2. A copy leases the pages it reads like a peer's copy does, so SGLang may free them meanwhile.
  3. No more than ``max_pages`` are on their way; what comes on top is put off, and offered again when copies have
     landed. Nothing waits. What has left the pool by then, and what is more than ``MAX_PUT_OFF_PAGES``, is dropped and
     counted.
  4. No page takes a frame from those of its own chain that come before it, as far as the chain was offered together.

A page: offered -> copying -> resident, or passed over, or put off -> offered, or dropped. One thread calls; the copies
have their own.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.arena.residency import Residency
from banyan.ports import Copy, Peers
from banyan.telemetry import Counters

MAX_PUT_OFF_PAGES = 1 << 16
"""Names remembered of pages that wait for their turn: a few megabytes."""


@dataclass(frozen=True, slots=True)
class _Moving:
    keys: Sequence[str]
    frames: list[int]
    copy: Copy


@dataclass(frozen=True, slots=True)
class Landed:
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
    ) -> None:
        self._residency = residency
        self._peers = peers
        self._pool_slots = [pool_slot]
        self._arena_slots = list(arena_slots)
        self._max_pages = max_pages
        self._counters = counters
        self._moving: deque[_Moving] = deque()
        self._on_their_way: set[str] = set()
        self._put_off: deque[tuple[Sequence[str], Sequence[str]]] = deque()
        self._num_put_off = 0

    def offer(self, keys: Sequence[str]) -> None:
        """A chain of pages that this rank's pool has just published."""
        num_present = self._num_present(keys)
        self._send(keys[num_present:], keys[:num_present])

    def _send(self, keys: Sequence[str], behind: Sequence[str]) -> int:
        """Copy what the pool holds of ``keys``, as far as there is room, and put off the rest; how many it holds.
        ``behind``: the pages of the chain before them, which stay where they are."""
        found = self._peers.lookup(keys, self._pool_slots) if keys else None
        if found is None or found.num_pages == 0:
            return 0
        room = min(found.num_pages, self._max_pages - len(self._on_their_way))
        frames = self._residency.claim(max(0, room), sparing=behind)
        self._put_aside(keys[len(frames) : found.num_pages], [*behind, *keys[: len(frames)]])
        sent = keys[: len(frames)]
        lease = self._peers.lease(found, sent) if frames else None
        if lease is None:
            self._residency.abandon(frames)
            return found.num_pages
        self._moving.append(_Moving(sent, frames, self._peers.start_copy([(lease, array("q", frames))])))
        self._on_their_way.update(sent)
        return found.num_pages

    def _put_aside(self, keys: Sequence[str], behind: Sequence[str]) -> None:
        if self._num_put_off + len(keys) > MAX_PUT_OFF_PAGES:
            self._counters.backups_dropped_pages += len(keys)
        elif keys:
            self._put_off.append((keys, behind))
            self._num_put_off += len(keys)

    def _offer_again(self) -> None:
        """What was put off, the oldest first, as far as there is room."""
        for _ in range(len(self._put_off)):
            if len(self._on_their_way) >= self._max_pages:
                return
            keys, behind = self._put_off.popleft()
            self._num_put_off -= len(keys)
            num_present = self._num_present(keys)
            keys, behind = keys[num_present:], [*behind, *keys[:num_present]]
            self._counters.backups_dropped_pages += len(keys) - self._send(keys, behind)

    def _num_present(self, keys: Sequence[str]) -> int:
        """Leading pages that need no copy. A chain has no holes: a page is never evicted before its children."""
        num_present = self._peers.lookup(keys, self._arena_slots).num_pages
        while num_present < len(keys) and keys[num_present] in self._on_their_way:
            num_present += 1
        return num_present

    def poll(self) -> list[Landed]:
        """Publish what has landed since the last call. Never blocks."""
        landed, num_moving = [], len(self._moving)
        while self._moving and self._moving[0].copy.has_ended:
            done = self._land(self._moving.popleft())
            if done is not None:
                landed.append(done)
        if len(self._moving) < num_moving:
            self._offer_again()
        return landed

    def _land(self, moved: _Moving) -> Landed | None:
        self._on_their_way.difference_update(moved.keys)
        if not moved.copy.finish():
            self._counters.backups_failed += 1
            self._residency.abandon(moved.frames)
            return None
        # Another rank may have been as quick with the same pages: one copy is enough for the node.
        num_twice = self._peers.lookup(moved.keys, self._arena_slots).num_pages
        self._residency.abandon(moved.frames[:num_twice])
        keys, frames = moved.keys[num_twice:], moved.frames[num_twice:]
        self._residency.publish(frames, keys)
        self._counters.backed_up_pages += len(keys)
        return Landed(keys, frames) if keys else None

    def quiesce(self) -> None:
        """Wait for what is on its way and forget it."""
        for moving in self._moving:
            moving.copy.finish()
            self._residency.abandon(moving.frames)
        self._moving.clear()
        self._on_their_way.clear()
        self._put_off.clear()
        self._num_put_off = 0
