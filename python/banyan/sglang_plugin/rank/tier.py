# SPDX-License-Identifier: Apache-2.0
"""The tiers below a rank's pool, for one kind of pages, put together: its part of the host arena, and behind it the
sources of pages: the store, and what features bring.

Everything is called on the scheduler thread. Copies and I/O run on their own threads; ``poll`` collects what they did.
A `HostTier` lives for one namespace; after a weights update the rank makes another one on the same memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from banyan import _native
from banyan.arena.backup import Backup
from banyan.arena.owners import Owners
from banyan.arena.page_source import Source, Wanted, Worth
from banyan.arena.partner import Partner
from banyan.arena.persistence import Persistence
from banyan.arena.prefetch import Prefetch
from banyan.arena.remote_tier import RemoteTier
from banyan.arena.residency import Residency
from banyan.arena.store_tier import StoreTier
from banyan.arena.window import backup_limit_bytes, read_limit_bytes
from banyan.layout.member_slots import MemberSlots
from banyan.pacing.admission import WriteAdmission
from banyan.pacing.lockstep import READER_PATIENCE_S
from banyan.ports import OwnFrameTable, PageStore, Peers
from banyan.sglang_plugin.pools.quarantine import POLL_S
from banyan.sglang_plugin.rank.arena_memory import Arena
from banyan.sglang_plugin.rank.points import SourceAccess, TierParts
from banyan.sglang_plugin.rank.reporting.arena_events import ArenaEvents
from banyan.sglang_plugin.rank.reporting.store_events import StoreEvents
from banyan.store.backends import asked_store, native_store
from banyan.telemetry import Counters, one_thread

logger = logging.getLogger("banyan")

LAST_ANSWERS_S = 10.0
"""For what a slow drive has in flight when the rest was given up."""

MAX_SUMMED_BYTES = 1 << 30
"""Waiting for their checksums at once: a tenth of a second's work."""


def withdraw(frame_table: OwnFrameTable) -> None:
    """Withdraw a frame table's pages, and wait until no peer reads one. Nobody else waits for one of them to be let go.

    Raises:
        RuntimeError: when a peer does not stop reading.
    """
    frame_table.reset()
    deadline = time.monotonic() + READER_PATIENCE_S
    while frame_table.num_quarantined:
        if time.monotonic() > deadline:
            held = frame_table.num_quarantined
            raise RuntimeError(f"peers have held {held} page(s) that are to go for over {READER_PATIENCE_S:g} s")
        frame_table.drain()
        time.sleep(POLL_S)


def _keep(arena: Arena, namespace: bytes, residency: Residency, counters: Counters) -> Persistence | None:
    """Take over what the arena has kept, and go on keeping."""
    if arena.index_file is None:
        return None
    try:
        executor = one_thread("banyan-keep")
    except RuntimeError as error:
        # After an update of the weights, too: that is no reason to share nothing.
        logger.error("banyan: no page of the arena is kept for the next server from now on: %s", error)
        return None
    entries = arena.index_file.entries(namespace)
    residency.adopt([entry.frame for entry in entries], [entry.key for entry in entries])
    persistence = Persistence(
        index_file=arena.index_file,
        residency=residency,
        checksums=arena.checksums(namespace),
        executor=executor,
        # They are held meanwhile: most of a small arena is to stay free for others.
        max_pages=max(1, min(MAX_SUMMED_BYTES // arena.block.frame_bytes, arena.num_frames // 4)),
        counters=counters,
    )
    residency.watch(persistence)
    return persistence


def _told(events: ArenaEvents | None, residency: Residency) -> ArenaEvents | None:
    """Tell of what the arena has kept, and go on telling."""
    if events is not None:
        events.has(residency.keys)
        residency.watch(events)
    return events


def _told_of_store(events: ArenaEvents | None, store: PageStore | None) -> StoreEvents | None:
    """Tell of the store, where somebody is told of the arena and the store can say what it holds."""
    native = native_store(store)
    return None if events is None or native is None else StoreEvents(native)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """Where a tier is. ``peers`` reads every frame table of the node, also this rank's own pool; its copies land in
    this rank's part of the arena. ``link_bytes_per_s``: how fast pages move between pool and arena; 0.0: not
    measured. ``kept``: keys of pages that go last; ``cold`` gives those of some keys whose pages go first."""

    rank_table: _native.RankTable
    member_slots: MemberSlots
    namespace: bytes
    arena: Arena
    peers: Peers
    layers_per_read: int
    link_bytes_per_s: float
    counters: Counters
    kept: Collection[str]
    cold: Callable[[Sequence[str]], list[str]]
    owners: Owners


@dataclass(frozen=True, slots=True)
class WritableStore:
    """A store, and what this rank may write to it."""

    store: PageStore
    admission: WriteAdmission


class HostTier:
    """One rank's part of the arena, what fills it and what empties it.

    Args:
        behind: what opens the sources behind the store.
    """

    def __init__(
        self,
        place: TierPlace,
        writable: WritableStore | None,
        partner: Partner,
        behind: Sequence[SourceAccess],
        events: ArenaEvents | None,
    ) -> None:
        arena, memory, counters = place.arena, place.arena.memory, place.counters
        store = None if writable is None else writable.store
        frame_bytes, member_slots = arena.block.frame_bytes, place.member_slots
        most_down_bytes = backup_limit_bytes(link_bytes_per_s=place.link_bytes_per_s, arena_bytes=memory.num_bytes)
        self._rank_table = place.rank_table
        self._member_slots = member_slots
        self._all_slots = [member_slots.own, *member_slots.peers, *member_slots.arenas]
        self._num_reading = 0
        self._pages_per_s = 0
        self._counters = counters
        self._cold = place.cold
        self.partner = partner
        self._frame_table = _native.FrameTable(
            place.rank_table,
            member_slots.own_arena,
            place.namespace,
            memory,
            arena.num_frames,
            arena.block.table(),
            frame_bytes,
        )
        self._peers = place.peers
        self._growth = arena.growth
        self.residency = place.owners.residency(self._frame_table, arena.num_backed, place.kept)
        self._persistence = _keep(arena, place.namespace, self.residency, counters)
        self._events = _told(events, self.residency)
        self.store_events = _told_of_store(events, store)
        self.backup = Backup(
            residency=self.residency,
            peers=self._peers,
            pool_slot=member_slots.own,
            pool_slots=member_slots.with_peers,
            arena_slots=member_slots.arenas,
            max_pages=max(1, most_down_bytes // frame_bytes),
            counters=counters,
        )
        self.prefetch = Prefetch(
            store=store,
            residency=self.residency,
            peers=self._peers,
            arena_slots=member_slots.arenas,
            memory=memory,
            frame_bytes=frame_bytes,
            max_pages=min(arena.num_frames, read_limit_bytes(arena_bytes=memory.num_bytes) // frame_bytes),
            layers_per_read=place.layers_per_read,
            counters=counters,
        )
        self.store = None if writable is None else self._store_tier(writable, place)
        self.sources = self._sources_of(place, store, behind)

    def _store_tier(self, writable: WritableStore, place: TierPlace) -> StoreTier:
        return StoreTier(
            store=writable.store,
            residency=self.residency,
            prefetch=self.prefetch,
            memory=place.arena.memory,
            block=place.arena.block,
            admission=writable.admission,
            owners=place.owners,
            counters=self._counters,
            orphaned=self.partner.orphaned,
        )

    def _sources_of(
        self, place: TierPlace, store: PageStore | None, behind: Sequence[SourceAccess]
    ) -> Sequence[Source]:
        """The nearest first."""
        sources: list[Source] = [] if self.store is None else [self.store]
        asked = asked_store(store)
        if asked is not None:
            bring = self.prefetch.start_reads
            sources.append(
                RemoteTier(asked, bring=bring, prefetch=self.prefetch, counters=self._counters, clock=time.monotonic)
            )
        parts = TierParts(
            namespace=place.namespace,
            memory=place.arena.memory,
            prefetch=self.prefetch,
            residency=self.residency,
            store=self.store if asked is None else None,
            files=native_store(store),
            counters=self._counters,
        )
        for access in behind:
            sources = access.sources(parts, sources)
        return sources

    @property
    def wants_all(self) -> bool:
        """Whether somebody takes pages from the arena as soon as they are complete: a store, the next server, the other
        server of a pair."""
        return bool(self.sources) or self._persistence is not None or type(self.partner) is not Partner

    # ---- requests that have come -------------------------------------------------------------------------------

    def arrive(self, request: str, keys: Sequence[str], worth: Worth) -> None:
        """A request for the prompt of ``keys`` has come: prefetch what only sources hold and what passes ``worth``,
        before the request is scheduled."""
        partner = self.partner
        partner.came(keys, partial(self._look_again, request, keys, worth))
        num_in_arena = self._touch(keys) if partner.uses_arena else 0
        if not partner.reads_ahead:
            self.learn([keys])
            return
        if not self.sources:
            return
        num_here = self._num_held(keys, num_in_arena)
        wanted = Wanted(request, keys, num_here, worth, num_here)
        for source in self.sources:
            wanted = wanted.after(source.ask(wanted))
        self._tell_reading()

    def _look_again(self, request: str, keys: Sequence[str], worth: Worth) -> None:
        """Others have announced pages since the request came."""
        num_here = self._num_held(keys, 0)
        wanted = Wanted(request, keys, num_here, worth, num_here)
        for source in self.sources:
            source.start_read(wanted)

    def is_awaited(self, request: str) -> bool:
        """Whether a source was asked for this request's prompt and may still answer."""
        return any(source.is_awaited(request) for source in self.sources)

    def _touch(self, keys: Sequence[str]) -> int:
        """A prompt's pages are wanted again, also when this rank's own pool holds them too; how many the arena has.
        With write-back only those behind what the pool holds, which goes down again, and how many of them."""
        if self.backup.write_back.is_on:
            keys = keys[self._peers.lookup(keys, [self._member_slots.own]).num_pages :]
        in_arena = self._peers.lookup(keys, self._member_slots.arenas)
        self._peers.touch(in_arena)
        return in_arena.num_pages

    def num_on_node(self, keys: Sequence[str]) -> int:
        """How many leading pages this node holds, in pools and in the arena."""
        return self._num_held(keys, 0)

    def on_node(self, keys: Sequence[str]) -> set[str]:
        """Which of these pages this node holds, each by itself."""
        holders = self._peers.holders(keys, self._all_slots)
        return {key for key, holder in zip(keys, holders, strict=True) if holder is not None}

    def num_stored(self, keys: Sequence[str]) -> int:
        """How many leading pages the store holds."""
        return 0 if self.store is None else self.store.num_stored(keys)

    def num_there(self, keys: Sequence[str]) -> int:
        """How many leading pages this node holds, and behind them the store."""
        num_held = self.num_on_node(keys)
        return num_held + self.num_stored(keys[num_held:])

    def _num_held(self, keys: Sequence[str], num_in_arena: int) -> int:
        """How many leading pages the node holds, the first ``num_in_arena`` of them in the arena."""
        if num_in_arena == len(keys):
            return num_in_arena
        return num_in_arena + self._peers.lookup(keys[num_in_arena:], self._all_slots).num_pages

    # ---- down --------------------------------------------------------------------------------------------------

    def learn(self, chains: Iterable[Sequence[str]]) -> None:
        """Chains of pages, each from its root: the store writes no page whose parent it does not know."""
        if self.store is not None:
            self.store.learn(chains)

    def poll(self) -> None:
        """Collect what copies and I/O have finished. Never blocks."""
        if self._growth is not None and (num_new := self._growth.poll(self.residency.num_free)):
            self.residency.grow(num_new)
        for landed in self.backup.poll():
            if cold := self._cold(landed.keys):
                self.residency.demote(cold)
            keys = self.partner.to_write(landed.keys)
            if self.store is not None and keys:
                self.store.landed(keys)
        self.prefetch.poll()
        # The store last: what is read goes before what is written.
        for source in reversed(self.sources):
            source.poll()
        if self.store is not None:
            self.partner.meet(self.store, self._counters)
            self._tell_reading()
        if self._persistence is not None:
            self._persistence.poll()

    def _tell_reading(self) -> None:
        """Let the dispatcher and the server's main process know how many pages this rank waits for, and how fast they
        come."""
        num_reading, pages_per_s = self.prefetch.num_reading, self.prefetch.pages_per_s
        if num_reading != self._num_reading:
            self._num_reading = num_reading
            self._rank_table.set_reading(self._member_slots.own, num_reading)
        if pages_per_s != self._pages_per_s:
            self._pages_per_s = pages_per_s
            self._rank_table.set_read_rate(self._member_slots.own, pages_per_s)

    # ---- life --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every page of the arena. Copies that are attached to a read have ended."""
        self._quiesce()
        if self._persistence is not None:
            self._persistence.quiesce()
        self.residency.reset()

    def leave(self) -> None:
        """Withdraw every page, wait until no peer reads one, and leave the rank table. The memory is another tier's
        then.

        Raises:
            RuntimeError: when a peer does not stop reading, or the store's drive may still write to the memory.
        """
        self._end()
        deadline_s = time.monotonic() + LAST_ANSWERS_S
        while any(left := self._left_behind()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if any(left):
            num_reads, num_written = left
            raise RuntimeError(
                f"{num_reads} reads of the store (--banyan-store), and {num_written} pages for it, have had no answer: "
                "their frames cannot be used for other weights. Look at the drive, and start the server again"
            )
        if self._events is not None:
            self._events.evicted(self.residency.keys)
        withdraw(self._frame_table)
        self._frame_table.close()
        for source in self.sources:
            source.close()

    def _left_behind(self) -> tuple[int, int]:
        """Reads of the store, and pages for it, whose frames it may still use: behind ``quiesce`` what was in flight
        is all that is left."""
        self.prefetch.poll()
        if self.store is None:
            return self.prefetch.num_left_behind, 0
        self.store.poll()
        return self.prefetch.num_left_behind, self.store.num_left_behind

    def close(self) -> None:
        """Leave the rank table for good. What was kept stays as it is."""
        self._end()
        if self._growth is not None:
            self._growth.close()
        self._frame_table.close()
        for source in self.sources:
            source.close()

    def _quiesce(self) -> None:
        self.backup.quiesce()
        self.partner.forget()
        for source in self.sources:
            source.forget()
        self.prefetch.quiesce()
        if self.store is not None:
            self.store.quiesce()

    def _end(self) -> None:
        self._quiesce()
        if self._persistence is not None:
            self._persistence.close()

    def state(self) -> dict[str, int]:
        """This tier's part of ``/server_info``."""
        return {
            "num_arena_frames": self.residency.num_frames,
            "num_arena_pages": self.residency.num_resident,
            "num_arena_filling_frames": self.residency.num_filling,
            "num_arena_evicted_pages": self.residency.num_evicted,
            "num_reading_pages": self._num_reading,
        }
