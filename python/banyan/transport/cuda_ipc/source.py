# SPDX-License-Identifier: Apache-2.0
"""Peers on GPUs, as ``banyan.cache`` wants them: found and leased by the native directory, copied by a kernel.

Invariants
  1. A lease is granted only when its pages have room in the page lists and every peer it names is open: after that no
     step of the copy can run out of anything.
  2. A target page belongs to at most one batch that is not yet enqueued (SGLang hands a page out once).
  3. After a driver call was refused nothing is leased any more: the rank goes on computing, and has said why.

One thread, the scheduler's.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from banyan.ports import Frames, Match
from banyan.transport.cuda_ipc.copies import (
    CudaCopy,
    DeviceFrames,
    EventPool,
    HostBoundCopy,
    LayerGroups,
    PageKernel,
    PageLists,
)
from banyan.transport.cuda_ipc.driver import CopyDriver, DriverError
from banyan.transport.cuda_ipc.mappings import Peer, PeerMappings
from banyan.transport.cuda_ipc.places import OWN_ROW, WORD_BYTES
from banyan.transport.cuda_ipc.ring_space import RingSpace

logger = logging.getLogger("banyan")

NUM_LISTS = 3


class NativeLease(Protocol):
    """A lease of the native directory, which knows the frames behind it."""

    num_pages: int
    runs: list[tuple[int, int]]

    def sources(self) -> list[tuple[int, int, bytes]]: ...

    def release(self) -> None: ...


class Directory(Protocol):
    """The part of ``banyan._native.Peers`` that does not touch pages."""

    def version(self) -> int: ...

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match: ...

    def touch(self, match: Any) -> None: ...

    def lease(self, match: Any, num_pages: int) -> NativeLease | None: ...

    def present(self) -> list[Peer]: ...


@dataclass(slots=True)
class CudaLease:
    """Pages that may be copied, with the rows of their peers. Implements ``banyan.ports.Lease``."""

    num_pages: int
    runs: list[tuple[int, int]]
    rows: list[tuple[int, bytes]]
    _give_back: Callable[[], None]
    _is_held: bool = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._give_back()


@dataclass(slots=True)
class _Batch:
    copy: CudaCopy
    loads: list[tuple[CudaLease, Frames | DeviceFrames]]
    has_lists: bool = field(default=False)


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
    ) -> None:
        """``page_bytes`` of a page over all layers; ``num_pages`` of the target bound what can be under way.

        ``target_row`` is the place that copies land in: the own pool, or the own part of the host arena. What lands
        in the arena is for processors, which no stream orders: there ``finish`` waits.
        """
        self._directory = directory
        self._driver = driver
        self._kernel = kernel
        self._mappings = mappings
        self._groups = groups
        self._order = order
        self._page_bytes = page_bytes
        self._target_row = target_row
        self._copy_kind = CudaCopy if target_row == OWN_ROW else HostBoundCopy
        self._events = EventPool(driver)
        self._room = RingSpace(num_pages)
        list_bytes = NUM_LISTS * self._room.size * WORD_BYTES
        self._lists = driver.allocate(list_bytes)
        self._staging = driver.allocate_pinned(list_bytes)
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
        if self._is_broken or self._num_leased + num_pages > self._room.capacity:
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

    def start_copy(
        self, loads: Sequence[tuple[CudaLease, Frames | DeviceFrames]], arrivals: Sequence[Any] = ()
    ) -> CudaCopy:
        """Enqueue the copies of all loads, layer group by layer group, as one batch.

        Target frames may be known here (int64 buffers) or to the device only.

        Raises:
            ValueError: when frames and lease differ in number, or for arrivals: what comes from the store lands in the
                arena first, and is leased from there. Nothing was enqueued.
        """
        if arrivals:
            raise ValueError(f"{len(arrivals)} reads to follow: a pool on a GPU is filled from the arena")
        for lease, frames in loads:
            num_frames = frames.numel() if isinstance(frames, DeviceFrames) else len(frames)
            if num_frames != lease.num_pages:
                raise ValueError(f"{num_frames} frames for a lease of {lease.num_pages} pages")
        num_pages = sum(lease.num_pages for lease, _ in loads)
        copy = self._copy_kind(
            streams=self._driver,
            groups=self._groups,
            num_bytes=num_pages * self._page_bytes,
            current_stream=self._order.current_stream,
            consumers=self._order.consumers,
        )
        batch = _Batch(copy, list(loads))
        self._under_way.append(batch)
        try:
            self._enqueue(batch, num_pages)
        except DriverError as error:
            copy.fail(self._last_event())
            self._is_broken = True
            logger.error("banyan: sharing is off from here on, a copy could not be enqueued: %s", error)
        return copy

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
            self._events.give(batch.copy.take_events())
            for lease, _ in batch.loads:
                lease.release()
            if batch.has_lists:
                self._room.give_back()

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
        self._driver.free(self._lists)
        self._driver.free_pinned(self._staging)

    def _enqueue(self, batch: _Batch, num_pages: int) -> None:
        stream = self._order.copy_stream
        for event in self._order.ready_events():
            self._driver.wait_event(stream, event)
        lists = self._upload(batch, num_pages)
        for group in range(self._groups.num_groups):
            extents = self._groups.extents(group)
            self._kernel.enqueue(stream=stream, lists=lists, target_row=self._target_row, extents=extents)
            event = self._events.take()
            self._driver.record_event(event, stream)
            batch.copy.group_enqueued(event)

    def _upload(self, batch: _Batch, num_pages: int) -> PageLists:
        """Bring rows and source pages from here, target pages from where SGLang has them: here or on the device."""
        stream = self._order.copy_stream
        first = NUM_LISTS * WORD_BYTES * self._room.take(num_pages)
        batch.has_lists = True
        size = num_pages * WORD_BYTES
        start = self._lists + first
        lists = PageLists(rows=start, sources=start + size, targets=start + 2 * size, num_pages=num_pages)
        rows, sources = array("q"), array("q")
        offset = first + 2 * size
        for lease, frames in batch.loads:
            for row, pages in lease.rows:
                sources.frombytes(pages)
                rows.extend([row] * (len(sources) - len(rows)))
            if isinstance(frames, DeviceFrames):
                num_bytes = frames.numel() * WORD_BYTES
                self._driver.copy_async(self._lists + offset, frames.data_ptr(), num_bytes, stream)
            else:
                num_bytes = self._stage(offset, bytes(memoryview(frames).cast("B")))
            offset += num_bytes
        self._stage(first, (rows + sources).tobytes())
        return lists

    def _stage(self, offset: int, numbers: bytes) -> int:
        """Bring numbers to ``offset`` of the lists, by way of pinned memory; their size in bytes."""
        ctypes.memmove(self._staging + offset, numbers, len(numbers))
        self._driver.copy_async(self._lists + offset, self._staging + offset, len(numbers), self._order.copy_stream)
        return len(numbers)
