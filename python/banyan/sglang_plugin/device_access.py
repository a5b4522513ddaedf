# SPDX-License-Identifier: Apache-2.0
"""A rank's pool on a GPU: announced by IPC handles, read by peers' kernels, published when its events have passed.

Invariants
  1. A page is published after everything that was enqueued when SGLang put it into its tree: the forward that writes
     a stashed chunk may still run then.
  2. The scheduler thread enqueues, asks and goes on. It waits for the device in ``leave`` only, at a weight update.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from banyan import _native
from banyan.cache import PrefixCache
from banyan.config import Config
from banyan.layout import BlockGeometry
from banyan.planner import Piece
from banyan.ports import OwnShelf, Source
from banyan.sglang_plugin.allocator import POLL_S, READER_PATIENCE_S, QuarantiningAllocator
from banyan.sglang_plugin.device_allocator import DeviceAllocator
from banyan.sglang_plugin.device_start import find_route, open_driver, open_ring, pin_arena
from banyan.sglang_plugin.pool_access import Publish
from banyan.sglang_plugin.tiers import Seats
from banyan.transport.capability import Route
from banyan.transport.cuda_ipc.copies import LayerGroups
from banyan.transport.cuda_ipc.copy_stream import open_copy_stream
from banyan.transport.cuda_ipc.description import PoolDescription, describe
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.gpu_io import ArenaReads
from banyan.transport.cuda_ipc.layer_times import LayerTimer
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW, PlaceTable
from banyan.transport.cuda_ipc.readback import ReadbackLane
from banyan.transport.cuda_ipc.source import CudaSource, StreamOrder
from banyan.transport.kv_trans.launch import KvTrans, TileShape, on_torch_stream

logger = logging.getLogger("banyan")

ABSENCE_PERIOD_S = 0.1
"""How often peers that died are looked for: the native core notices a death within as much."""


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def markable_stream() -> int | None:
    """The calling thread's stream; None while a graph is captured, for an event that is recorded then is part of it."""
    return None if torch.cuda.is_current_stream_capturing() else current_stream()


class DeviceAccess:
    """Implements ``PoolAccess`` on CUDA."""

    def __init__(
        self,
        *,
        pool: Any,
        page_tokens: int,
        config: Config,
        num_slots: int,
        forward_stream: Any,
        record_ready: Callable[[], list[Any]],
        arena: _native.SharedBytes | None,
    ) -> None:
        """``record_ready`` is the linker's ``record_offload_ready``; ``arena`` this rank's part of the host arena."""
        self._page_tokens = page_tokens
        self._forward_stream = forward_stream
        self._record_ready = record_ready
        self._ready: list[Any] = []
        self._geometry = pool.banyan_geometry
        self._extents = pool.banyan_extents
        self._device = pool.device
        self._driver = open_driver()
        route = find_route(self._driver, self._extents, has_arena=arena is not None)
        self.shares_pool = route is Route.DIRECT
        self._device_uuid = self._driver.device_uuid(self._driver.current_device())
        self._page_bytes = tuple(extent.page_bytes for layer in self._geometry.layers for extent in layer)
        self._groups = LayerGroups(
            tuple(len(extents) for extents in self._geometry.layers), config.copy_layers_per_launch
        )
        self._open_streams(config, num_slots)
        self._published: ReadbackLane[list[str]] = ReadbackLane(
            self._driver, stream=self._readback_stream, num_pages=self._geometry.num_pages
        )
        self._arena_address = None if arena is None else pin_arena(self._driver, arena)
        self._ring = open_ring(self._driver, stream=self._copy_stream) if config.store else None
        self.follows_reads = self._ring is not None
        self._completed: deque[bool] = deque()
        self._publish: Publish | None = None
        self._allocator: DeviceAllocator | None = None
        self._timer: LayerTimer[tuple[Piece, ...]] | None = None
        self._sources: list[CudaSource] = []
        self._next_absence_s = 0.0

    def _open_streams(self, config: Config, num_slots: int) -> None:
        driver = self._driver
        self._readback_stream, self._backup_stream = driver.create_stream(), driver.create_stream()
        self._places = PlaceTable(
            driver, stream=self._readback_stream, num_peers=num_slots, num_extents=len(self._page_bytes)
        )
        addresses = [address for address, _ in self._extents]
        shape = TileShape.fitting(self._page_bytes, alignment_bytes=_alignment(addresses))
        self._alignment_bytes = shape.alignment_bytes
        words = [size // shape.word_bytes for size in self._page_bytes]
        self._page_words = torch.tensor(words, dtype=torch.int64, device=self._device)
        self._kernel = KvTrans(
            table=self._places.address,
            page_words=self._page_words.data_ptr(),
            page_bytes=self._page_bytes,
            shape=shape,
            num_programs=config.copy_sms,
            on_stream=on_torch_stream,
        )
        opened = open_copy_stream(driver, num_sms=config.copy_sms, try_kernel=self._kernel.warm_up)
        self._copy_stream = self._places.stream = opened.stream
        self._places.write(OWN_ROW, addresses, self._page_bytes)
        # Once, at the start: what the warm-up and the table's first row were enqueued for is there.
        torch.cuda.synchronize()
        logger.info("banyan: copies between GPUs on %s; their speed was not measured yet", opened.note)

    # ---- PoolAccess --------------------------------------------------------------------------------------------

    def attach(self, publish: Publish) -> None:
        self._publish = publish

    def guard(self, allocator: QuarantiningAllocator, cache: PrefixCache) -> None:
        assert isinstance(allocator, DeviceAllocator)
        lane: ReadbackLane[torch.Tensor] = ReadbackLane(
            self._driver, stream=self._driver.create_stream(), num_pages=self._geometry.num_pages
        )
        freed = self._driver.create_event()

        def freed_events() -> list[int]:
            self._driver.record_event(freed, current_stream())
            return [freed]

        allocator.attach_lane(cache, lane, freed_events)
        self._allocator = allocator

    def frames(self, slots: torch.Tensor) -> Any:
        return (slots[:: self._page_tokens] // self._page_tokens).to(torch.int64).contiguous()

    def join(self, roster: _native.Roster, seats: Seats, namespace: bytes) -> tuple[OwnShelf, Source]:
        geometry = self._geometry
        pool = _native.DevicePool(self._description().encode(), geometry.num_bytes)
        shelf = _native.Shelf(roster, seats.own, namespace, pool, geometry.num_pages, geometry.table())
        peers = _native.Peers(roster, seats.own, seats.own, namespace, geometry.table(), pool)
        order = StreamOrder(self._copy_stream, current_stream, self._consumers, self._ready_events)
        reads = None
        if self._ring is not None:
            reads = ArenaReads(self._ring, frame_bytes=BlockGeometry.of_pool(geometry).frame_bytes)
        return shelf, self._open_source(peers, seats, order, num_pages=geometry.num_pages, reads=reads)

    def arena_view(
        self,
        roster: _native.Roster,
        seats: Seats,
        namespace: bytes,
        block: BlockGeometry,
        memory: _native.SharedBytes,
    ) -> Source:
        assert self._arena_address is not None
        num_frames = block.num_frames(memory.num_bytes)
        table = block.table()
        bases = [self._arena_address + offset for layer in table for offset, _ in layer]
        self._places.write(ARENA_ROW, bases, [block.frame_bytes] * len(bases))
        torch.cuda.synchronize()  # At a start or a weight update: two copy streams read this row.
        peers = _native.Peers(roster, None, seats.own_arena, namespace, table, memory, block.frame_bytes)
        # What it reads was published, what it writes is leased: there is nothing on the device to wait for.
        order = StreamOrder(self._backup_stream, current_stream, tuple, tuple)
        return self._open_source(peers, seats, order, num_pages=num_frames, target_row=ARENA_ROW)

    def _description(self) -> PoolDescription:
        """How peers open the pool; where they cannot, a description that opens nothing, and they take the arena."""
        if not self.shares_pool:
            return PoolDescription(self._device_uuid, (), ())
        return describe(self._driver, self._device_uuid, self._extents)

    def _open_source(
        self,
        peers: _native.Peers,
        seats: Seats,
        order: StreamOrder,
        *,
        num_pages: int,
        target_row: int = OWN_ROW,
        reads: ArenaReads | None = None,
    ) -> CudaSource:
        own_rows = {seats.own: OWN_ROW}
        if self._arena_address is not None:
            own_rows[seats.own_arena] = ARENA_ROW
        source = CudaSource(
            directory=peers,
            driver=self._driver,
            kernel=self._kernel,
            mappings=PeerMappings(
                driver=self._driver,
                places=self._places,
                page_bytes=self._page_bytes,
                alignment_bytes=self._alignment_bytes,
                announcements=peers,
                own_rows=own_rows,
            ),
            groups=self._groups,
            order=order,
            page_bytes=self._geometry.full_block_bytes,
            num_pages=num_pages,
            target_row=target_row,
            reads=reads,
        )
        self._sources.append(source)
        return source

    def offload(self, slots: torch.Tensor, keys: list[str]) -> bool:
        try:
            self._published.send(keys, self.frames(slots), behind=self._ready_events())
        except DriverError as error:
            logger.error("banyan: pages cannot be published any more: %s", error)
            return False
        return True

    def time_layers(
        self, num_layers: int, took: Callable[[tuple[Piece, ...], float], None]
    ) -> LayerTimer[tuple[Piece, ...]]:
        self._timer = LayerTimer(self._driver, num_layers=num_layers, current_stream=markable_stream, took=took)
        return self._timer

    def poll(self) -> None:
        assert self._publish is not None and self._allocator is not None
        while (taken := self._published.take()) is not None:
            keys, numbers = taken
            self._publish(np.frombuffer(numbers, dtype=np.int64), keys)
            self._completed.append(True)
        self._allocator.poll()
        for source in self._sources:
            source.settle()
        if self._ring is not None:
            self._ring.settle()
        if self._timer is not None:
            self._timer.poll()
        now_s = time.monotonic()
        if now_s >= self._next_absence_s:
            self._next_absence_s = now_s + ABSENCE_PERIOD_S
            for source in self._sources:
                source.close_absent()

    @property
    def num_completed(self) -> int:
        return len(self._completed)

    def pop_completed(self) -> bool:
        return self._completed.popleft()

    def wait_for_copies(self) -> None:
        deadline_s = time.monotonic() + READER_PATIENCE_S
        while num_under_way := sum(source.num_under_way for source in self._sources):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{num_under_way} copies were still under way after {READER_PATIENCE_S:g} s")
            for source in self._sources:
                source.settle()
            time.sleep(POLL_S)

    def leave(self) -> None:
        self._completed.extend([False] * self._published.forget())
        self.wait_for_copies()
        for source in self._sources:
            source.close()
        self._sources.clear()

    def forget(self) -> None:
        self._published.forget()
        self._completed.clear()

    # ---- streams -----------------------------------------------------------------------------------------------

    def _consumers(self) -> tuple[int, ...]:
        current = current_stream()
        if self._forward_stream is None or self._forward_stream.cuda_stream == current:
            return (current,)
        return current, self._forward_stream.cuda_stream

    def _ready_events(self) -> list[int]:
        # Held until the next call: an event that is collected is destroyed before anybody has waited for it.
        self._ready = self._record_ready()
        return [event.cuda_event for event in self._ready]


def _alignment(addresses: Sequence[int]) -> int:
    """The largest power of two, up to 256, that divides all addresses."""
    return min(256, *(address & -address for address in addresses))
