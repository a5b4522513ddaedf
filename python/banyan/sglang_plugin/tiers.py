# SPDX-License-Identifier: Apache-2.0
"""The tiers below a rank's pool, put together: its part of the host arena, and the store behind it.

Everything is called on the scheduler thread. Copies and I/O run on their own threads; ``tick`` collects what they did.
A `HostTier` lives for one namespace; after a weights update the rank makes another one on the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from banyan import _native
from banyan.arena.archive import Archive
from banyan.arena.backup import Backup
from banyan.arena.keeping import Keeping
from banyan.arena.lineage import Lineage
from banyan.arena.prefetch import Prefetch, Worth
from banyan.arena.residency import Residency
from banyan.pacing import WriteAdmission
from banyan.ports import OwnShelf, PageStore, Source
from banyan.sglang_plugin.allocator import POLL_S, READER_PATIENCE_S
from banyan.sglang_plugin.arena_memory import Arena
from banyan.telemetry import Counters

MAX_BACKUP_BYTES = 256 << 20
"""On their way down at once: some 700 pages of a small model, 50 of a 70B. More is dropped, never waited for."""

MAX_READ_BYTES = 1 << 30
"""On their way up at once."""

MAX_SUMMED_BYTES = 1 << 30
"""Waiting for their checksums at once: a tenth of a second's work."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Roster slots: shard ``i`` of the node has its pool in slot ``i`` and its part of the arena ``num_shards`` on."""

    num_ranks: int
    tp_size: int
    dp_rank: int
    tp_rank: int

    @property
    def num_shards(self) -> int:
        return self.num_ranks * self.tp_size

    @property
    def own(self) -> int:
        return self.dp_rank * self.tp_size + self.tp_rank

    def rank_of(self, slot: int) -> int:
        """The rank whose pool, or part of the arena, has this slot."""
        return slot % self.num_shards // self.tp_size

    @property
    def own_arena(self) -> int:
        return self.num_shards + self.own

    @property
    def arenas(self) -> list[int]:
        """All parts of the arena, the own one first."""
        return [self.num_shards + (self.own + step) % self.num_shards for step in range(self.num_shards)]

    @property
    def peers(self) -> list[int]:
        """The other pools, the next one first, so that ranks which all want the same choose different sources."""
        return [(self.own + step) % self.num_shards for step in range(1, self.num_shards)]

    def is_arena(self, slot: int) -> bool:
        return slot >= self.num_shards


def withdraw(shelf: OwnShelf | _native.Shelf) -> None:
    """Withdraw a shelf's pages, wait until no peer reads one, and leave the roster.

    Raises:
        RuntimeError: when a peer does not stop reading.
    """
    shelf.reset()
    deadline = time.monotonic() + READER_PATIENCE_S
    while shelf.num_quarantined:
        if time.monotonic() > deadline:
            held = shelf.num_quarantined
            raise RuntimeError(f"weights update: peers have held {held} page(s) for over {READER_PATIENCE_S:g} s")
        shelf.drain()
        time.sleep(POLL_S)
    shelf.close()


def _keep(arena: Arena, namespace: bytes, residency: Residency, counters: Counters) -> Keeping | None:
    """Take over what the arena has kept, and go on keeping."""
    if arena.inventory is None:
        return None
    entries = arena.inventory.entries(namespace)
    residency.adopt([entry.frame for entry in entries], [entry.key for entry in entries])
    keeping = Keeping(
        inventory=arena.inventory,
        residency=residency,
        checksums=arena.checksums(namespace),
        executor=ThreadPoolExecutor(1, thread_name_prefix="banyan-keep"),
        # They are held meanwhile: most of a small arena is to stay free for others.
        max_pages=max(1, min(MAX_SUMMED_BYTES // arena.block.frame_bytes, arena.num_frames // 4)),
        counters=counters,
    )
    residency.watch(keeping)
    return keeping


class HostTier:
    """One rank's part of the arena, what fills it and what empties it.

    ``view`` reads every shelf of the node, also this rank's own pool; its copies land in this rank's part of the arena.
    """

    def __init__(
        self,
        *,
        roster: _native.Roster,
        seats: Seats,
        namespace: bytes,
        arena: Arena,
        view: Source,
        store: PageStore | None,
        admission: WriteAdmission,
        layers_per_read: int,
        counters: Counters,
    ) -> None:
        memory, block, num_frames = arena.memory, arena.block, arena.num_frames
        table, frame_bytes = block.table(), block.frame_bytes
        self._seats = seats
        self._store = store
        self._counters = counters
        self._shelf = _native.Shelf(roster, seats.own_arena, namespace, memory, num_frames, table, frame_bytes)
        self._view = view
        self._residency = Residency(self._shelf, num_frames)
        self._keeping = _keep(arena, namespace, self._residency, counters)
        # Only the store needs to know which page comes before which.
        self._lineage = Lineage() if store is not None else None
        self._backup = Backup(
            residency=self._residency,
            view=self._view,
            pool_slot=seats.own,
            arena_slots=seats.arenas,
            max_pages=max(1, MAX_BACKUP_BYTES // frame_bytes),
            counters=counters,
        )
        self.prefetch: Prefetch | None = None
        self._archive: Archive | None = None
        if store is not None and self._lineage is not None:
            store.register(memory)
            self.prefetch = Prefetch(
                store=store,
                residency=self._residency,
                view=self._view,
                arena_slots=seats.arenas,
                memory=memory,
                frame_bytes=frame_bytes,
                max_pages=max(1, MAX_READ_BYTES // frame_bytes),
                layers_per_read=layers_per_read or len(table),
                counters=counters,
            )
            self._archive = Archive(
                store=store,
                residency=self._residency,
                lineage=self._lineage,
                admission=admission,
                memory=memory,
                frame_bytes=frame_bytes,
                block_bytes=block.block_bytes,
                counters=counters,
                clock=time.monotonic_ns,
            )

    def arrive(self, keys: Sequence[str], worth: Worth) -> None:
        """A request for the prompt of ``keys`` has come: bring up what only the store holds and what is ``worth`` it,
        before it is its turn."""
        if self._lineage is not None:
            self._lineage.learn(keys)
        # What the arena holds is wanted again, also when this rank's own pool holds it too.
        self._view.touch(self._view.lookup(keys, self._seats.arenas))
        if self._archive is not None:
            self._archive.sight(keys)
        if self.prefetch is not None:
            held = self._view.lookup(keys, [self._seats.own, *self._seats.peers, *self._seats.arenas])
            self.prefetch.want(keys[held.num_pages :], worth)

    def back_up(self, keys: Sequence[str], chains: Callable[[], Iterable[Sequence[str]]]) -> None:
        """This rank's pool has published a chain of pages. It follows a prompt that has arrived, or an answer that was
        just given: ``chains`` gives those, from their roots."""
        if self._lineage is not None and self._lineage.parent(keys[0]) is None:
            for chain in chains():
                self._lineage.learn(chain)
        self._backup.offer(keys)

    def tick(self) -> None:
        """Collect what copies and I/O have finished. Never blocks."""
        for landed in self._backup.poll():
            if self._archive is not None:
                self._archive.sight(landed.keys)
        if self.prefetch is not None:
            self.prefetch.poll()
        if self._archive is not None:
            self._archive.poll()
        if self._keeping is not None:
            self._keeping.poll()

    def reset(self) -> None:
        """Forget every page of the arena. Copies that follow a read have ended."""
        self._quiesce()
        if self._keeping is not None:
            self._keeping.quiesce()
        self._residency.reset()

    def leave(self) -> None:
        """Withdraw every page, wait until no peer reads one, and leave the roster. The memory is another tier's then.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self._end()
        withdraw(self._shelf)

    def close(self) -> None:
        """Leave the roster for good. What was kept stays as it is."""
        self._end()
        self._shelf.close()

    def _quiesce(self) -> None:
        self._backup.quiesce()
        if self.prefetch is not None:
            self.prefetch.quiesce()
        if self._archive is not None:
            self._archive.quiesce()

    def _end(self) -> None:
        self._quiesce()
        if self._keeping is not None:
            self._keeping.close()

    def state(self) -> dict[str, int]:
        """This tier's part of ``/server_info``."""
        return {
            "num_arena_frames": self._residency.num_frames,
            "num_arena_pages": self._residency.num_resident,
            "num_arena_evicted_pages": self._residency.num_evicted,
        }
