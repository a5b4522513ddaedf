# SPDX-License-Identifier: Apache-2.0
"""Peers on GPUs, as ``banyan.cache`` wants them: found and leased by the native directory, copied by a kernel.

Invariants
  1. A lease is granted only when its pages have room in the page lists and every peer it names is open: after that no
     step of the copy can run out of anything.
  2. A target page belongs to at most one batch that is not yet enqueued (SGLang hands a page out once).
     Reads of the store are under way without a lease: there is as much room again for their pages, and a batch that
     finds none fails.
  3. After a driver call was refused nothing is leased any more: the rank goes on computing, and has said why.

One thread, the scheduler's.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from banyan.ports import Frames, Match, StoreRead
from banyan.transport.cuda_ipc.copies import (
    CudaCopy,
    DeviceFrames,
    EventPool,
    HostBoundCopy,
    LayerGroups,
    PageKernel,
)
from banyan.transport.cuda_ipc.driver import CopyDriver, DriverError
from banyan.transport.cuda_ipc.gpu_io import ArenaReads, FollowedReads
from banyan.transport.cuda_ipc.leases import CudaLease, Directory
from banyan.transport.cuda_ipc.mappings import Peer, PeerMappings
from banyan.transport.cuda_ipc.page_lists import ListSpace, Part
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW

logger = logging.getLogger("banyan")

Arrivals = Sequence[tuple[StoreRead, Sequence[int], "Frames | DeviceFrames"]]
"""As in ``banyan.ports.Source.start_copy``."""


@dataclass(slots=True)
class _Batch:
    copy: CudaCopy
    parts: list[Part]
    leases: list[CudaLease]
    reads: list[StoreRead]
    has_lists: bool = field(default=False)
    timed: tuple[int, ...] = ()
    """Timing events of a batch that was enqueued whole: behind all that it waits for, and its last one."""


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The streams of this rank, as functions because SGLang owns them.

    ``ready_events``: recorded now on every stream that may still touch a page that was handed out.
    """

    copy_stream: int
    current_stream: Callable[[], int]
    consumers: Callable[[], Sequence[int]]
    ready_events: Callable[[], Sequence[int]]


class CudaSource:
    """Implements ``banyan.ports.Source`` on CUDA."""

    def __init__(
        self,
        *,
        directory: Directory,
        driver: CopyDriver,
        kernel: PageKernel,
        mappings: PeerMappings,
        groups: LayerGroups,
        order: StreamOrder,
        page_bytes: int,
        num_pages: int,
        target_row: int = OWN_ROW,
        reads: ArenaReads | None = None,
    ) -> None:
        """``page_bytes`` of a page over all layers; ``num_pages`` of the target bound what can be under way.

        ``target_row`` is the place that copies land in: the own pool, or the own part of the host arena. What lands
        in the arena is for processors, which no stream orders: there ``finish`` waits. ``reads``: how to follow what
        comes from the store; None where nothing does.
        """
        self._directory = directory
        self._driver = driver
        self._kernel = kernel
        self._mappings = mappings
        self._groups = groups
        self._order = order
        self._page_bytes = page_bytes
        self._target_row = target_row
        self._reads = reads
        self._copy_kind = CudaCopy if target_row == OWN_ROW else HostBoundCopy
        self._events = EventPool(driver, driver.create_event)
        self._timing = EventPool(driver, driver.create_timing_event)
        self._max_leased = num_pages
        self._lists = ListSpace(driver, stream=order.copy_stream, num_pages=num_pages * (1 if reads is None else 2))
        self._num_leased = 0
        self._under_way: deque[_Batch] = deque()
        self._is_broken = False

    # ---- banyan.ports.Source -----------------------------------------------------------------------------------

    def version(self) -> int:
        return self._directory.version()

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match:
        return self._directory.lookup(keys, slots)

    def touch(self, match: Match) -> None:
        """Tell the owners that these pages are wanted."""
        self._directory.touch(match)

    def lease(self, match: Match, num_pages: int) -> CudaLease | None:
        """As the directory's; None also when a peer's pool cannot be reached or too much is under way."""
        self.settle()
        if self._is_broken or self._num_leased + num_pages > self._max_leased:
            return None
        lease = self._directory.lease(match, num_pages)
        if lease is None:
            return None
        acquired: list[Peer] = []
        rows: list[tuple[int, bytes]] = []

        def give_back() -> None:
            lease.release()
            for peer in acquired:
                self._mappings.release(peer)

        for slot, epoch, frames in lease.sources():
            row = self._mappings.acquire((slot, epoch), max(array("q", frames)))
            if row is None:
                give_back()
                return None
            acquired.append((slot, epoch))
            rows.append((row, frames))
        self._num_leased += num_pages

        def release() -> None:
            self._num_leased -= num_pages
            give_back()

        return CudaLease(num_pages, lease.runs, rows, release)

    def start_copy(self, loads: Sequence[tuple[CudaLease, Frames | DeviceFrames]], arrivals: Arrivals = ()) -> CudaCopy:
        """Enqueue the copies of all loads and arrivals, layer group by layer group, as one batch.

        Target frames may be known here (int64 buffers) or to the device only.

        Raises:
            ValueError: when pages and frames differ in number, or for arrivals where none can be followed. Nothing was
                enqueued.
        """
        parts = [Part(lease.rows, frames) for lease, frames in loads]
        parts += [self._arriving(*arrival) for arrival in arrivals]
        for part in parts:
            if part.num_targets != part.num_pages:
                raise ValueError(f"{part.num_targets} frames for {part.num_pages} pages")
        num_pages = sum(part.num_pages for part in parts)
        copy = self._copy_kind(
            streams=self._driver,
            groups=self._groups,
            num_bytes=num_pages * self._page_bytes,
            current_stream=self._order.current_stream,
            consumers=self._order.consumers,
        )
        batch = _Batch(copy, parts, [lease for lease, _ in loads], [read for read, _, _ in arrivals])
        self._under_way.append(batch)
        if self._is_broken or not self._lists.has_room(num_pages):
            copy.fail(self._last_event())
            logger.warning("banyan: a fetch of %d pages failed: %s", num_pages, self._reason())
        else:
            self._try_enqueue(batch, num_pages)
        return copy

    def _reason(self) -> str:
        return "a driver call was refused before" if self._is_broken else "too many are under way"

    def _arriving(self, read: StoreRead, positions: Sequence[int], frames: Frames | DeviceFrames) -> Part:
        if self._reads is None:
            raise ValueError("a read of the store cannot be followed here: its pages are leased when they have landed")
        return Part([(ARENA_ROW, self._reads.pages(read, positions))], frames)

    def _try_enqueue(self, batch: _Batch, num_pages: int) -> None:
        try:
            self._enqueue(batch, num_pages)
        except DriverError as error:
            batch.copy.fail(self._last_event())
            self._is_broken = True
            logger.error("banyan: sharing is off from here on, a copy could not be enqueued: %s", error)

    def _last_event(self) -> int | None:
        """An event behind all that is on the copy stream; None when even that is refused."""
        try:
            event = self._events.take()
            self._driver.record_event(event, self._order.copy_stream)
        except DriverError:
            return None
        return event

    # ---- the rest ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give back the leases of batches that have landed. Called on every scheduling step."""
        while self._under_way and self._under_way[0].copy.has_ended:
            batch = self._under_way.popleft()
            self._give_events(batch)
            for lease in batch.leases:
                lease.release()
            if batch.has_lists:
                self._lists.give_back()

    def _give_events(self, batch: _Batch) -> None:
        events = batch.copy.take_events()
        self._timing.give(batch.timed)
        self._events.give([event for event in events if event not in batch.timed])

    def close_absent(self) -> None:
        """Unmap the pools of ranks that left or died. Called about as often as deaths can be noticed."""
        self._mappings.keep(self._directory.present())

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def close(self) -> None:
        """Unmap everything. Everything enqueued must be done: the caller has waited for the device, at the end."""
        self.settle()
        assert not self._under_way
        self._mappings.close()
        self._events.close()
        self._timing.close()
        self._lists.close()

    def _enqueue(self, batch: _Batch, num_pages: int) -> None:
        stream = self._order.copy_stream
        for event in self._order.ready_events():
            self._driver.wait_event(stream, event)
        lists = self._lists.take(num_pages)
        batch.has_lists = True
        self._lists.upload(lists, batch.parts)
        followed = self._follow(batch)
        began = self._timing.take()
        self._driver.record_event(began, stream)
        for group in range(self._groups.num_groups):
            if followed is not None:
                followed.wait(stream, self._groups.last_layer(group))
            extents = self._groups.extents(group)
            self._kernel.enqueue(stream=stream, lists=lists, target_row=self._target_row, extents=extents)
            is_last = group == self._groups.num_groups - 1
            event = (self._timing if is_last else self._events).take()
            self._driver.record_event(event, stream)
            batch.copy.group_enqueued(event)
            if is_last:
                batch.timed = (began, event)
                batch.copy.timed_by(partial(self._driver.elapsed_s, began, event))
        if followed is not None:
            followed.passed(stream)

    def _follow(self, batch: _Batch) -> FollowedReads | None:
        """The reads that the copy stream waits for; None when there are none, or when they are over already."""
        if self._reads is None or not batch.reads:
            return None
        followed = self._reads.follow(batch.reads)
        if followed is not None:
            batch.copy.follow(followed)
        return followed
