# SPDX-License-Identifier: Apache-2.0
"""The tiers below a rank's pool, put together: its part of the host arena, and behind it the store and other nodes.

Everything is called on the scheduler thread. Copies and I/O run on their own threads; ``poll`` collects what they did.
A `HostTier` lives for one namespace; after a weights update the rank makes another one on the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from banyan import _native
from banyan.arena.backup import Backup
from banyan.arena.dual_path import DualPath
from banyan.arena.errand_tier import ErrandTier
from banyan.arena.keeping import Keeping
from banyan.arena.node_tier import NodeTier, OtherNodes
from banyan.arena.prefetch import Prefetch, Worth
from banyan.arena.remote_tier import RemoteTier
from banyan.arena.residency import Residency
from banyan.arena.store_tier import StoreTier
from banyan.arena.window import backup_limit_bytes, read_limit_bytes
from banyan.disagg import Others, Role
from banyan.layout.seats import Seats
from banyan.nodes.errands import Errands
from banyan.pacing import WriteAdmission
from banyan.ports import OwnShelf, PageStore, Peers
from banyan.routing.hint import ReadHint, SourceHint
from banyan.routing.reads import LEAST_PART_TOKENS
from banyan.sglang_plugin.pools.quarantine import POLL_S, READER_PATIENCE_S
from banyan.sglang_plugin.rank.arena_events import ArenaEvents
from banyan.sglang_plugin.rank.arena_memory import Arena
from banyan.sglang_plugin.rank.store_events import StoreEvents
from banyan.store import asked_store, telling_store
from banyan.telemetry import Counters

MAX_SUMMED_BYTES = 1 << 30
"""Waiting for their checksums at once: a tenth of a second's work."""


def withdraw(shelf: OwnShelf | _native.Shelf) -> None:
    """Withdraw a shelf's pages, and wait until no peer reads one. Nobody else waits for one of them to be let go.

    Raises:
        RuntimeError: when a peer does not stop reading.
    """
    shelf.reset()
    deadline = time.monotonic() + READER_PATIENCE_S
    while shelf.num_quarantined:
        if time.monotonic() > deadline:
            held = shelf.num_quarantined
            raise RuntimeError(f"peers have held {held} page(s) that are to go for over {READER_PATIENCE_S:g} s")
        shelf.drain()
        time.sleep(POLL_S)


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


def _told(events: ArenaEvents | None, residency: Residency) -> ArenaEvents | None:
    """Tell of what the arena has kept, and go on telling."""
    if events is not None:
        events.has(residency.keys)
        residency.watch(events)
    return events


def _told_of_store(events: ArenaEvents | None, store: PageStore | None) -> StoreEvents | None:
    """Tell of the store, where somebody is told of the arena and the store can say what it holds."""
    telling = telling_store(store)
    return None if events is None or telling is None else StoreEvents(telling)


def _asked_store(store: PageStore | None, prefetch: Prefetch, counters: Counters) -> RemoteTier[Any] | None:
    """The store, where it has to be asked what it holds."""
    keyed = asked_store(store)
    if keyed is None:
        return None
    bring = prefetch.start_reads
    return RemoteTier(keyed, bring=bring, prefetch=prefetch, counters=counters, clock=time.monotonic)


class HostTier:
    """One rank's part of the arena, what fills it and what empties it.

    ``peers`` reads every shelf of the node, also this rank's own pool; its copies land in this rank's part of the
    arena.
    """

    def __init__(
        self,
        *,
        roster: _native.Roster,
        seats: Seats,
        namespace: bytes,
        arena: Arena,
        peers: Peers,
        store: PageStore | None,
        nodes: OtherNodes | None,
        errands: Errands | None,
        admission: WriteAdmission,
        layers_per_read: int,
        role: Role,
        takes_back: bool,
        link_bytes_per_s: float,
        events: ArenaEvents | None,
        counters: Counters,
    ) -> None:
        memory, block, num_frames = arena.memory, arena.block, arena.num_frames
        frame_bytes = block.frame_bytes
        most_down_bytes = backup_limit_bytes(link_bytes_per_s=link_bytes_per_s, arena_bytes=memory.num_bytes)
        self._roster = roster
        self._seats = seats
        self._num_reading = 0
        self._pages_per_s = 0
        self._counters = counters
        self._others = Others(role, time.monotonic, takes_back=takes_back) if role.is_paired else None
        self._shelf = _native.Shelf(roster, seats.own_arena, namespace, memory, num_frames, block.table(), frame_bytes)
        self._peers = peers
        self._growth = arena.growth
        self._residency = Residency(self._shelf, arena.num_backed)
        self._keeping = _keep(arena, namespace, self._residency, counters)
        self._events = _told(events, self._residency)
        self.store_events = _told_of_store(events, store)
        self._backup = Backup(
            residency=self._residency,
            peers=self._peers,
            pool_slot=seats.own,
            arena_slots=seats.arenas,
            max_pages=max(1, most_down_bytes // frame_bytes),
            counters=counters,
        )
        self.prefetch = Prefetch(
            store=store,
            residency=self._residency,
            peers=peers,
            arena_slots=seats.arenas,
            memory=memory,
            frame_bytes=frame_bytes,
            max_pages=min(num_frames, read_limit_bytes(arena_bytes=memory.num_bytes) // frame_bytes),
            layers_per_read=layers_per_read,
            counters=counters,
        )
        self.store: StoreTier | None = None
        if store is not None:
            self.store = StoreTier(
                store=store,
                residency=self._residency,
                prefetch=self.prefetch,
                memory=memory,
                block=block,
                admission=admission,
                counters=counters,
                orphaned=self._others.orphans.refused if self._others is not None else None,
            )
        self._ask(store, nodes)
        self._errands = None if errands is None or store is None else self._errand_tier(errands)

    def _ask(self, store: PageStore | None, nodes: OtherNodes | None) -> None:
        make = partial(NodeTier, prefetch=self.prefetch, counters=self._counters, clock=time.monotonic)
        self._nodes = None if nodes is None else make(nodes)
        self._keyed = _asked_store(store, self.prefetch, self._counters)
        self._asked = [asked for asked in (self._keyed, self._nodes) if asked is not None]
        self._dual: DualPath | None = None
        # What a store knows only when it is asked cannot be divided when the request comes.
        if self.store is not None and self._nodes is not None and self._keyed is None:
            least_pages = LEAST_PART_TOKENS // self._roster.page_tokens
            self._dual = DualPath(self.store, self._nodes, self.prefetch, least_pages)

    def _errand_tier(self, errands: Errands) -> ErrandTier:
        return ErrandTier(
            errands,
            prefetch=self.prefetch,
            residency=self._residency,
            peers=self._peers,
            arena_slots=self._seats.arenas,
            counters=self._counters,
            clock=time.monotonic,
        )

    def arrive(
        self,
        request: str,
        keys: Sequence[str],
        worth: Worth,
        reads: ReadHint | None = None,
        source: SourceHint | None = None,
    ) -> None:
        """A request for the prompt of ``keys`` has come: bring up what only the store holds and what is ``worth`` it,
        before it is its turn. ``reads``: who is to read it; ``source``: whose arenas have more of it."""
        if self._others is not None:
            self._others.came(keys, partial(self._look_again, request, worth, reads))
            if not self._others.role.reads_ahead:
                if self._others.takes_back:
                    self._touch(keys)
                if self.store is not None:
                    self.store.learn([keys])
                return
        num_in_arena = self._touch(keys)
        if self.store is None and not self._asked:
            return
        num_held = self._num_held(keys, num_in_arena)
        if self._dual is not None and reads is not None:
            self._dual.arrive(request, keys, num_held, worth, node=reads.node, first_page=self._first_page(reads))
            self._tell_reading()
            return
        if self.store is not None:
            num_held = self.store.arrive(keys, num_held, worth)
            self._tell_reading()
        missing, behind = keys[num_held:], keys[:num_held]
        if self._keyed is not None:
            self._keyed.arrive(request, missing, worth, behind)
        if self._nodes is not None:
            self._ask_nodes(self._nodes, source, request, missing, worth, behind)

    def _ask_nodes(
        self,
        nodes: NodeTier,
        source: SourceHint | None,
        request: str,
        keys: Sequence[str],
        worth: Worth,
        behind: Sequence[str],
    ) -> None:
        if source is None:
            nodes.arrive(request, keys, worth, behind)
            return
        # A hint names a node by its first shard's door.
        doors = [str(door.of_shard(self._seats.shard)) for door in source.doors]
        nodes.arrive_told(request, keys, worth, behind, doors)

    def _touch(self, keys: Sequence[str]) -> int:
        """A prompt's pages are wanted again, also when this rank's own pool holds them too; how many the arena has."""
        in_arena = self._peers.lookup(keys, self._seats.arenas)
        self._peers.touch(in_arena)
        return in_arena.num_pages

    def num_on_node(self, keys: Sequence[str]) -> int:
        """How many leading pages this node holds, in pools and in the arena."""
        return self._num_held(keys, 0)

    def is_awaited(self, request: str) -> bool:
        """Whether the store or other nodes were asked for this request's prompt and may still answer."""
        return any(asked.is_awaited(request) for asked in self._asked)

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for this request: nobody else is to read the same."""
        return self._nodes is not None and self._nodes.is_sent_for(request)

    def _look_again(
        self, request: str, worth: Worth, reads: ReadHint | None, store: StoreTier, keys: Sequence[str]
    ) -> None:
        """Others have announced pages since the request came."""
        if self.is_sent_for(request):
            return
        if self._dual is None or reads is None:
            store.look_again(keys, self._num_held(keys, 0), worth)
        else:
            self.send_for(request, keys, worth, reads)

    def send_for(self, request: str, keys: Sequence[str], worth: Worth, reads: ReadHint) -> bool:
        """Have what is missing now of the prompt of ``keys`` read by whom ``reads`` says; whether that was heard: then
        another node reads, or this one has begun to."""
        if self._dual is None:
            return self.is_sent_for(request)
        num_held = self._num_held(keys, 0)
        self._dual.look_again(request, keys, num_held, worth, node=reads.node, first_page=self._first_page(reads))
        return True

    def _first_page(self, reads: ReadHint) -> int:
        return reads.first_token // self._roster.page_tokens

    def _num_held(self, keys: Sequence[str], num_in_arena: int) -> int:
        """How many leading pages the node holds, the first ``num_in_arena`` of them in the arena."""
        if num_in_arena == len(keys):
            return num_in_arena
        shelves = [self._seats.own, *self._seats.peers, *self._seats.arenas]
        return num_in_arena + self._peers.lookup(keys[num_in_arena:], shelves).num_pages

    def to_keep(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain of pages goes to the arena here: of a pair, each may keep a part."""
        return keys if self._others is None else self._others.to_keep(keys)

    def back_up(self, keys: Sequence[str]) -> None:
        """This rank's pool has published a chain of pages."""
        self._backup.offer(keys)

    def poll(self) -> None:
        """Collect what copies and I/O have finished. Never blocks."""
        if self._growth is not None and (num_new := self._growth.poll(self._residency.num_free)):
            self._residency.grow(num_new)
        for landed in self._backup.poll():
            keys = landed.keys if self._others is None else self._others.to_write(landed.keys)
            if self.store is not None and keys:
                self.store.landed(keys)
        self.prefetch.poll()
        for asked in self._asked:
            asked.poll()
        if self.store is not None:
            self.store.poll()
            if self._errands is not None:
                self._errands.poll()
            self._meet_others(self.store)
            self._tell_reading()
        if self._keeping is not None:
            self._keeping.poll()

    def _tell_reading(self) -> None:
        """Let the dispatcher and the server's main process know how many pages this rank waits for, and how fast they
        come."""
        num_reading, pages_per_s = self.prefetch.num_reading, self.prefetch.pages_per_s
        if num_reading != self._num_reading:
            self._num_reading = num_reading
            self._roster.set_reading(self._seats.own, num_reading)
        if pages_per_s != self._pages_per_s:
            self._pages_per_s = pages_per_s
            self._roster.set_read_rate(self._seats.own, pages_per_s)

    def _meet_others(self, store: StoreTier) -> None:
        """Offer again what came before its prompt; read what others have announced for prompts that came before it."""
        if self._others is None:
            return
        self._others.orphans.offer_again(store.offer_again)
        self._counters.archive_refused_pages += self._others.orphans.take_given_up()
        if self._others.role.learns_from_others:
            for keys, look_again in self._others.arrivals.to_look_up(store.take_news()):
                look_again(store, keys)

    def reset(self) -> None:
        """Forget every page of the arena. Copies that are attached to a read have ended."""
        self._quiesce()
        if self._keeping is not None:
            self._keeping.quiesce()
        self._residency.reset()

    def leave(self) -> None:
        """Withdraw every page, wait until no peer reads one, and leave the roster. The memory is another tier's then.

        Raises:
            RuntimeError: when a peer does not stop reading, or the store's drive may still write to the memory.
        """
        self._end()
        if self.prefetch.num_left_behind:
            raise RuntimeError(
                f"{self.prefetch.num_left_behind} reads of the store (--banyan-store) have had no answer: their frames "
                "cannot be used for other weights. Look at the drive, and start the server again"
            )
        if self._events is not None:
            self._events.evicted(self._residency.keys)
        withdraw(self._shelf)
        self._shelf.close()

    def close(self) -> None:
        """Leave the roster for good. What was kept stays as it is."""
        self._end()
        if self._growth is not None:
            self._growth.close()
        self._shelf.close()

    def _quiesce(self) -> None:
        self._backup.quiesce()
        if self._others is not None:
            self._others.orphans.clear()
        for asked in self._asked:
            asked.forget()
        if self._errands is not None:
            self._errands.forget()
        self.prefetch.quiesce()
        if self.store is not None:
            self.store.quiesce()

    def _end(self) -> None:
        self._quiesce()
        if self._keeping is not None:
            self._keeping.close()

    def state(self) -> dict[str, int]:
        """This tier's part of ``/server_info``."""
        return {
            "num_arena_frames": self._residency.num_frames,
            "num_arena_pages": self._residency.num_resident,
            "num_arena_filling_frames": self._residency.num_filling,
            "num_arena_evicted_pages": self._residency.num_evicted,
            "num_reading_pages": self._num_reading,
        }
