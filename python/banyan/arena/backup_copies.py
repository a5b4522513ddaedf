# SPDX-License-Identifier: Apache-2.0
"""Pages of this rank's pool on their way to its part of the arena.

Invariants
  1. A copy leases the pages it reads like a peer's copy does, so SGLang may free them meanwhile.
  2. A page is on its way from the moment it is leased until it is resident or given up.
  3. Whatever fails, a frame that was claimed for a page is published or abandoned, and a lease is released.
  4. Pages that two ranks copy at once are published once: whoever comes second finds them there.

A page: leased -> copying -> resident, or given up. One thread calls; the copies have their own.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec

from banyan.arena.residency import Residency
from banyan.ports import Copy, Lease, Match, Peers
from banyan.telemetry import Counters

MOST_COPIES = 16
"""At a time: each takes the scheduler some launches on a GPU."""


class Placed(msgspec.Struct, frozen=True):
    """Pages of a chain, in the order of their prefix, and the arena's frames for them."""

    keys: Sequence[str]
    frames: list[int]


class _Moving(msgspec.Struct, frozen=True):
    chains: Sequence[Placed]
    copy: Copy


class BackupCopies:
    """``pool_slot``, ``arena_slots``: of this rank's pool and of all parts of the arena, in the rank table.
    ``pages_a_copy``: at most, where that makes no more than ``MOST_COPIES`` and no chain has more."""

    def __init__(
        self,
        *,
        residency: Residency,
        peers: Peers,
        pool_slot: int,
        arena_slots: Sequence[int],
        pages_a_copy: int,
        counters: Counters,
    ) -> None:
        self._residency = residency
        self._peers = peers
        self._pool_slots = [pool_slot]
        self._arena_slots = list(arena_slots)
        self._pages_a_copy = pages_a_copy
        self._counters = counters
        self._moving: deque[_Moving] = deque()
        self._on_their_way: set[str] = set()
        self._leased: list[tuple[Lease, Placed]] = []
        """What the next copy is to bring."""

    @property
    def num_on_their_way(self) -> int:
        return len(self._on_their_way)

    @property
    def is_copying(self) -> bool:
        """Whether a copy is on its way. It ends by itself."""
        return any(not moving.copy.has_ended for moving in self._moving)

    def in_pool(self, keys: Sequence[str]) -> Match:
        """Leading pages that the pool has."""
        return self._peers.lookup(keys, self._pool_slots)

    def num_present(self, keys: Sequence[str]) -> int:
        """Leading pages that need no copy. What lies behind a page that is missing is copied once more."""
        num_present = self._num_in_arena(keys)
        while num_present < len(keys) and keys[num_present] in self._on_their_way:
            num_present += 1
        return num_present

    def runs(self, keys: Sequence[str]) -> list[tuple[bool, list[str]]]:
        """The chain in runs of pages that need no copy (True), each by itself, and such that do. Those that are there
        are wanted again."""
        there = self._peers.holders(list(keys), self._arena_slots)
        needs_none = [slot is not None or key in self._on_their_way for key, slot in zip(keys, there, strict=True)]
        pages = zip(needs_none, keys, strict=True)
        runs = [(is_there, [key for _, key in run]) for is_there, run in groupby(pages, itemgetter(0))]
        for is_there, run in runs:
            if is_there:
                self._peers.touch(self._peers.lookup(run, self._arena_slots))
        return runs

    def _num_in_arena(self, keys: Sequence[str]) -> int:
        """Leading pages that some part of the arena has."""
        if len(self._arena_slots) > 1:
            return self._peers.lookup(keys, self._arena_slots).num_pages
        num_present = 0
        while num_present < len(keys) and self._residency.frame(keys[num_present]) is not None:
            num_present += 1
        return num_present

    def take(self, found: Match, wanted: Placed) -> bool:
        """Lease pages of the pool for the next copy; whether they were still there."""
        lease = None
        try:
            lease = self._peers.lease(found, wanted.keys)
        finally:
            if lease is None:
                self._residency.abandon(wanted.frames)
        if lease is None:
            self._counters.backups_dropped_pages += len(wanted.keys)
            return False
        self._leased.append((lease, wanted))
        self._on_their_way.update(wanted.keys)
        return True

    def send(self) -> None:
        """Start to copy what is leased. Who waits for the pool's pages gets those of each copy when it has ended."""
        num_pages = sum(len(chain.keys) for _, chain in self._leased)
        pages_a_copy = max(self._pages_a_copy, -(-num_pages // MOST_COPIES))
        while self._leased:
            sent = self._leased[: self._num_chains(pages_a_copy)]
            loads = [(lease, array("q", chain.frames)) for lease, chain in sent]
            self._moving.append(_Moving([chain for _, chain in sent], self._peers.start_copy(loads)))
            del self._leased[: len(sent)]

    def _num_chains(self, most_pages: int) -> int:
        """Of what is leased, the first that have so many pages together; one at least."""
        num_pages = 0
        for number, (_, chain) in enumerate(self._leased):
            num_pages += len(chain.keys)
            if num_pages > most_pages:
                return max(1, number)
        return len(self._leased)

    def let_go(self) -> None:
        """Of what is leased and not sent: nobody will."""
        for lease, _ in self._leased:
            lease.release()
        self._give_up([chain for _, chain in self._leased])
        self._leased = []

    @property
    def has_ended(self) -> bool:
        """Whether the oldest copy has."""
        return bool(self._moving) and self._moving[0].copy.has_ended

    def land(self) -> list[Placed]:
        """Publish what the oldest copy has brought."""
        moving = self._moving.popleft()
        for chain in moving.chains:
            self._on_their_way.difference_update(chain.keys)
        if not moving.copy.finish():
            self._counters.backups_failed += 1
            self._give_up(moving.chains)
            return []
        return [landed for chain in moving.chains if (landed := self._published(chain)).keys]

    def _published(self, chain: Placed) -> Placed:
        # Another rank may have been as quick with the same pages: one copy is enough for the node.
        there = self._peers.holders(list(chain.keys), self._arena_slots)
        pages = list(zip(chain.keys, chain.frames, there, strict=True))
        self._residency.abandon([frame for _, frame, slot in pages if slot is not None])
        keys = [key for key, _, slot in pages if slot is None]
        frames = [frame for _, frame, slot in pages if slot is None]
        self._residency.publish(frames, keys)
        self._counters.backed_up_pages += len(keys)
        return Placed(keys, frames)

    def _give_up(self, sent: Iterable[Placed]) -> None:
        """They have not come."""
        for chain in sent:
            self._on_their_way.difference_update(chain.keys)
            self._residency.abandon(chain.frames)

    def quiesce(self) -> None:
        """Wait for what is on its way and forget it."""
        self.let_go()
        for moving in self._moving:
            moving.copy.finish()
            self._give_up(moving.chains)
        self._moving.clear()
