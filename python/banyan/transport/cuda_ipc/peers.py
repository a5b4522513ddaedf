# SPDX-License-Identifier: Apache-2.0
"""Peers on GPUs, as ``banyan.cache`` wants them: found and leased by the native directory, copied by a kernel.

Invariants
  1. A lease is granted only when its pages have room in the page lists and every peer it names is open: after that no
     step of the copy can run out of anything.
  2. A target page belongs to at most one batch that is not yet enqueued (SGLang hands a page out once).
     Reads of the store are under way without a lease: their lane has room of its own, and a batch that finds none
     fails.
  3. After a driver call was refused nothing is leased any more: the rank goes on computing, and has said why.
  4. A lease never waits for a drive: it ends with the copy of its own pages, on a stream where no read is waited for.
  5. Nor does it wait for this rank's scheduler: the owner's pages are let go by a thread that runs no Python
     (``leases.LeaseWord``). What a lease takes here, ``poll`` gives back.

One thread, the scheduler's.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from banyan import _native
from banyan.ports import Frames, StoreRead
from banyan.transport.cuda_ipc.copies import (
    Chain,
    CudaCopy,
    DeviceFrames,
    HostBoundCopy,
    LayerGroups,
    PageKernel,
)
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.gpu_io import GpuIo
from banyan.transport.cuda_ipc.lane import Lane
from banyan.transport.cuda_ipc.leases import CudaLease, LeaseWord
from banyan.transport.cuda_ipc.mappings import Peer, PeerMappings
from banyan.transport.cuda_ipc.page_lists import Part
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW

logger = logging.getLogger("banyan")

Arrivals = Sequence[tuple[StoreRead, Sequence[int], "Frames | DeviceFrames"]]
"""As in ``banyan.ports.Peers.start_copy``."""


@dataclass(slots=True)
class _Batch:
    copy: CudaCopy
    leased: list[Part]
    arriving: list[Part]
    leases: list[CudaLease]
    reads: list[StoreRead]
    leased_chain: Chain | None = None

    @property
    def has_read_leased(self) -> bool:
        """Whether nothing of it reads a leased page any more."""
        return self.leased_chain is None or self.leased_chain.has_landed


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The streams of this rank, as functions because SGLang owns them.

    ``ready_events``: recorded now on every stream that may still touch a page that was handed out. ``follow_stream``
    carries what waits for reads of the store; ``copy_stream`` waits for none.
    """

    copy_stream: int
    follow_stream: int
    current_stream: Callable[[], int]
    consumers: Callable[[], Sequence[int]]
    ready_events: Callable[[], Sequence[int]]


class CudaPeers:
    """Implements ``banyan.ports.Peers`` on CUDA."""

    def __init__(
        self,
        *,
        directory: _native.Peers,
        driver: CudaDriver,
        kernel: PageKernel,
        mappings: PeerMappings,
        groups: LayerGroups,
        order: StreamOrder,
        ends: LeaseWord,
        page_bytes: int,
        num_pages: int,
        target_row: int = OWN_ROW,
        reads: GpuIo | None = None,
    ) -> None:
        """``page_bytes`` of a page over all layers; ``num_pages`` of the target bound what can be under way. ``ends``:
        the word of ``order.copy_stream``.

        ``target_row`` is the place that copies land in: the own pool, or the own part of the host arena. What lands
        in the arena is for processors, which no stream orders: there ``finish`` waits. ``reads``: how to follow what
        comes from the store; None where nothing does.
        """
        self._directory = directory
        self._driver = driver
        self._mappings = mappings
        self._groups = groups
        self._order = order
        self._ends = ends
        self._page_bytes = page_bytes
        self._reads = reads
        self._copy_kind = CudaCopy if target_row == OWN_ROW else HostBoundCopy
        self._max_leased = num_pages

        def lane(stream: int, num_pages: int, io: GpuIo | None = None) -> Lane:
            return Lane(
                driver=driver,
                kernel=kernel,
                groups=groups,
                stream=stream,
                num_pages=num_pages,
                target_row=target_row,
                io=io,
            )

        self._leased_lane = lane(order.copy_stream, num_pages)
        # No lease bounds these: a page may be handed out again while the copy of an aborted request is under way.
        self._arriving_lane = lane(order.follow_stream, 2 * num_pages, reads) if reads is not None else None
        self._num_leased = 0
        self._under_way: list[_Batch] = []
        self._is_broken = False

    # ---- banyan.ports.Peers -----------------------------------------------------------------------------------

    def version(self) -> int:
        return hash((self._directory.version(), self._mappings.version))

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> _native.Match:
        """As the directory's, in the pools that can be read: what lies elsewhere is no answer, and hides none."""
        if slots is None:
            slots = [slot for slot, _ in self._directory.present()]
        return self._directory.lookup(keys, self._mappings.reachable(slots))

    def holders(self, keys: Sequence[str], slots: Sequence[int]) -> Sequence[int | None]:
        """As the directory's, among the pools that can be read."""
        return self._directory.holders(keys, self._mappings.reachable(slots))

    def read_access_logs(self, slots: Sequence[int]) -> Sequence[bytes]:
        """Also of those whose pools cannot be read."""
        return self._directory.read_access_logs(slots)

    def touch(self, match: Any) -> None:
        """Tell the owners that these pages are wanted."""
        self._directory.touch(match)

    def lease(self, match: Any, keys: Sequence[str]) -> CudaLease | None:
        """As the directory's; None also when a peer has just left or too much is under way."""
        self.poll()
        num_pages = len(keys)
        if self._is_broken or self._num_leased + num_pages > self._max_leased:
            return None
        lease = self._directory.lease(match, keys)
        if lease is None:
            return None
        acquired: list[Peer] = []
        rows: list[tuple[int, bytes]] = []

        def give_back() -> None:
            lease.release()
            for peer in acquired:
                self._mappings.release(peer)

        for slot, epoch, frames in lease.sources():
            row = self._mappings.acquire((slot, epoch), array("q", frames))
            if row is None:
                give_back()
                return None
            acquired.append((slot, epoch))
            rows.append((row, frames))
        self._num_leased += num_pages

        def release() -> None:
            self._num_leased -= num_pages
            give_back()

        return CudaLease(lease, rows, release)

    def start_copy(self, loads: Sequence[tuple[CudaLease, Frames | DeviceFrames]], arrivals: Arrivals = ()) -> CudaCopy:
        """Enqueue the copies of all loads and arrivals, layer group by layer group, as one batch.

        Target frames may be known here (int64 buffers) or to the device only.

        Raises:
            ValueError: when pages and frames differ in number, or for arrivals where none can be followed. Nothing was
                enqueued.
        """
        leased = [Part(lease.rows, frames) for lease, frames in loads]
        arriving = [self._arriving(*arrival) for arrival in arrivals]
        for part in leased + arriving:
            if part.num_targets != part.num_pages:
                raise ValueError(f"{part.num_targets} frames for {part.num_pages} pages")
        num_pages = sum(part.num_pages for part in leased + arriving)
        copy = self._copy_kind(
            streams=self._driver,
            groups=self._groups,
            num_bytes=num_pages * self._page_bytes,
            current_stream=self._order.current_stream,
            consumers=self._order.consumers,
        )
        batch = _Batch(copy, leased, arriving, [lease for lease, _ in loads], [read for read, _, _ in arrivals])
        self._under_way.append(batch)
        obstacle = self._obstacle(batch)
        if obstacle is not None:
            copy.fail()
            logger.warning("banyan: a fetch of %d pages failed: %s", num_pages, obstacle)
            self.poll()
        else:
            self._try_enqueue(batch)
        return copy

    def _obstacle(self, batch: _Batch) -> str | None:
        if self._is_broken:
            return "a driver call was refused before"
        for lane, parts in ((self._leased_lane, batch.leased), (self._arriving_lane, batch.arriving)):
            if lane is not None and not lane.has_room(sum(part.num_pages for part in parts)):
                return "too many are under way"
        return None

    def _arriving(self, read: StoreRead, positions: Sequence[int], frames: Frames | DeviceFrames) -> Part:
        if self._reads is None:
            raise ValueError("a read of the store cannot be followed here: its pages are leased when they have landed")
        return Part([(ARENA_ROW, self._reads.pages(read, positions))], frames)

    def _try_enqueue(self, batch: _Batch) -> None:
        try:
            self._enqueue(batch)
        except BaseException as error:
            # Whatever it is, a part may be under way: the copy has failed, and keeps its leases until that has ended.
            batch.copy.fail()
            self._is_broken = True
            logger.error("banyan: sharing is off from here on, a copy could not be enqueued", exc_info=error)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    def _enqueue(self, batch: _Batch) -> None:
        ready = self._order.ready_events()
        if batch.leased:
            batch.leased_chain = self._leased_lane.begin()
            batch.copy.chains.append(batch.leased_chain)
            self._leased_lane.enqueue(batch.leased, ready)
            value = self._ends.ends.expect([lease.native for lease in batch.leases])
            self._driver.write_word(self._order.copy_stream, self._ends.address, value)
        if batch.arriving:
            assert self._arriving_lane is not None and self._reads is not None
            # It may wait for the reads, so it comes second. None: they are over already.
            followed = self._reads.follow(batch.reads)
            if followed is not None:
                batch.copy.follow(followed)
            batch.copy.chains.append(self._arriving_lane.begin())
            self._arriving_lane.enqueue(batch.arriving, ready, followed)

    # ---- the rest ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Give back what leases of pages that have been copied took. Called on every scheduling step."""
        for batch in self._under_way:
            if batch.leases and batch.has_read_leased:
                for lease in batch.leases:
                    lease.release()
                batch.leases.clear()
        self._under_way = [batch for batch in self._under_way if batch.leases or not batch.copy.has_ended]
        for lane in self._lanes():
            lane.poll()

    def _lanes(self) -> list[Lane]:
        return [self._leased_lane, *([self._arriving_lane] if self._arriving_lane is not None else [])]

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def close(self) -> None:
        """Everything enqueued must be done: the caller has waited for the device, at the end."""
        self.poll()
        assert not self._under_way
        for lane in self._lanes():
            lane.close()
