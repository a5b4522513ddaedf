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
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from banyan import _native
from banyan.config import Config
from banyan.layout import BlockGeometry
from banyan.layout.member_slots import MemberSlots
from banyan.pacing.lockstep import READER_PATIENCE_S
from banyan.planner import Piece
from banyan.ports import OwnFrameTable, Peers
from banyan.refusals.start import device_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.access import PoolAccess, Publish, Window
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.device_numbers import NumbersOnDevice
from banyan.sglang_plugin.pools.device_offloads import NodeKeys
from banyan.sglang_plugin.pools.device_start import (
    LINK_PROBE_BYTES,
    find_route,
    measure_link,
    open_ends,
    open_ring,
    pin_arena,
)
from banyan.sglang_plugin.pools.quarantine import POLL_S, OwnPages
from banyan.sglang_plugin.pools.rank_device import RankDevice
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.transport.capability import Route
from banyan.transport.cuda_ipc.copies import LayerGroups
from banyan.transport.cuda_ipc.description import PoolDescription, describe
from banyan.transport.cuda_ipc.driver import DriverError
from banyan.transport.cuda_ipc.gpu_io import GpuIo
from banyan.transport.cuda_ipc.host_pieces import HostPieces
from banyan.transport.cuda_ipc.layer_times import LayerTimer
from banyan.transport.cuda_ipc.leases import LeaseWord
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.numbers_to_device import NumbersToDevice
from banyan.transport.cuda_ipc.peers import CudaPeers, StreamOrder
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW, WORD_BYTES, PlaceTable
from banyan.transport.cuda_ipc.probe import NUM_PROBE_ROWS, OwnProbe, ProbeReader
from banyan.transport.cuda_ipc.readback import ReadbackLane
from banyan.transport.kv_trans.launch import KvTrans, TileShape, on_torch_stream

logger = logging.getLogger("banyan")

PRESENCE_PERIOD_S = 0.1
"""How often peers that came or died are looked for: the native core notices a death within as much."""


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def markable_stream() -> int | None:
    """The calling thread's stream; None while a graph is captured, for an event that is recorded then is part of it."""
    return None if torch.cuda.is_current_stream_capturing() else current_stream()


class DeviceAccess(PoolAccess):
    """A pool on a GPU."""

    def __init__(
        self,
        *,
        device: RankDevice,
        pool: Any,
        page_tokens: int,
        rank_table: _native.RankTable,
        member_slots: MemberSlots,
        config: Config,
        num_slots: int,
        forward_stream: Any,
        record_ready: Callable[[], list[Any]],
        arena: _native.SharedBytes | None,
        has_arena: bool,
        reserve: Reserve,
        devices: Sequence[int],
    ) -> None:
        """``device`` is shared by all pools of the rank; ``devices`` are those of all member slots; ``num_slots``
        counts the rank table's; ``record_ready`` is the linker's ``record_offload_ready``; ``arena`` this rank's part
        of the host arena, and ``has_arena`` whether its pages have a part to go to, be it another shard's; ``reserve``
        is kept free where a freed page comes late."""
        if forward_stream is None:
            # SGLang would record no event there, and pages would be published before the forward has written them.
            runtime.refuse(device_refusal("SGLang names no stream on which its forwards run"))
        self._rank_device = device
        self._reserve = reserve
        self._page_tokens = page_tokens
        self._rank_table, self._member_slots = rank_table, member_slots
        self._forward_stream = forward_stream
        self._record_ready = record_ready
        self._ready: list[Any] = []
        self._geometry = pool.banyan_geometry
        self._extents = pool.banyan_extents
        self._device = pool.device
        self._driver = device.driver
        self.pins = None if arena is None else self._pin_front(arena, config)
        self._has_arena = has_arena and (arena is None or self.pins is not None)
        route = find_route(self._driver, self._extents, devices, has_arena=self._has_arena)
        self.shares_pool = route.route is Route.DIRECT
        self._apart = {member_slot for member_slot, place in enumerate(devices) if place in route.apart}
        self._device_uuid = self._driver.device_uuid(self._driver.current_device())
        self._page_bytes = tuple(extent.page_bytes for layer in self._geometry.layers for extent in layer)
        self._groups = LayerGroups(
            tuple(len(extents) for extents in self._geometry.layers), config.copy_layers_per_launch
        )
        self._open_streams(config, num_slots)
        self.link_bytes_per_s = 0.0
        if self.pins is not None:
            self.link_bytes_per_s = measure_link(
                self._driver,
                device.backup_stream,
                self.pins.device_address,
                min(LINK_PROBE_BYTES, self.pins.num_pinned_bytes),
            )
        self._ring: GpuIo | None = None
        if config.reads_into_arena:
            frame_bytes = BlockGeometry.of_page(self._geometry.page).frame_bytes
            self._ring = open_ring(self._driver, stream=self._follow_stream, frame_bytes=frame_bytes)
        self.follows_reads = self._ring is not None
        self._allocator: NumbersOnDevice | None = None
        self._timer: LayerTimer[tuple[Piece, ...]] | None = None
        self._readers: list[CudaPeers] = []
        self._peers: _native.Peers | None = None
        self._mappings: PeerMappings | None = None
        self._fetches = config.fetches
        self._next_presence_s = 0.0

    def _pin_front(self, arena: _native.SharedBytes, config: Config) -> HostPieces | None:
        """What the last server has kept is wanted at once; else the arena grows."""
        num_bytes = arena.num_bytes if config.keep_host_arena else 0
        return pin_arena(self._driver, arena, config, self._rank_device.pinned, num_bytes)

    def _open_streams(self, config: Config, num_slots: int) -> None:
        driver = self._driver
        self._places = PlaceTable(
            driver,
            stream=self._rank_device.readback_stream,
            num_peers=num_slots + NUM_PROBE_ROWS,
            num_extents=len(self._page_bytes),
        )
        addresses = [address for address, _ in self._extents]
        shape = TileShape.fitting(self._page_bytes, alignment_bytes=_alignment(addresses))
        self._alignment_bytes = shape.alignment_bytes
        self._chunks = torch.tensor(shape.chunks(self._page_bytes), dtype=torch.int32, device=self._device)
        self._kernel = KvTrans(
            table=self._places.address,
            chunks=self._chunks.data_ptr(),
            page_bytes=self._page_bytes,
            shape=shape,
            num_programs=config.copy_sms,
            on_stream=on_torch_stream,
        )
        opened = self._rank_device.take_copy_streams(self._try_stream)
        self._copy_stream, self._follow_stream = opened.streams
        self._copy_ends = open_ends(driver)
        per_sm = self._kernel.programs_per_sm(driver.threads_per_sm(driver.current_device()))
        self._kernel.num_programs = opened.num_programs(per_sm)
        self._backup_kernel = self._kernel.on_grid(opened.num_backup_programs)
        self._places.stream = self._copy_stream
        self._places.write(OWN_ROW, addresses, self._page_bytes)
        self._probe = OwnProbe(driver, stream=self._copy_stream, num_bytes=self._page_bytes[0])
        self._prober = ProbeReader(driver, self._kernel, self._places, num_bytes=self._page_bytes[0])
        # Once, at the start: what the warm-up and the table's first row were enqueued for is there.
        torch.cuda.synchronize()

    def _try_stream(self, stream: int) -> None:
        """What a copy does, once: a refusal is to come now, not at the first request."""
        driver, event = self._driver, self._driver.create_event()
        self._kernel.warm_up(stream)
        driver.record_event(event, stream)
        driver.wait_event(stream, event)
        driver.copy_async(self._places.address, self._places.address, WORD_BYTES, stream)
        driver.destroy_event(event)

    # ---- PoolAccess --------------------------------------------------------------------------------------------

    @property
    def all_read_pool(self) -> bool:
        return self.shares_pool and not self._apart

    def attach(self, publish: Publish) -> None:
        self._rank_device.offloads.attach(publish)

    def guard(self, allocator: QuarantiningAllocator, pages: OwnPages) -> None:
        assert isinstance(allocator, NumbersOnDevice)
        device, num_pages = self._rank_device, self._geometry.num_pages
        lane: ReadbackLane[torch.Tensor] = ReadbackLane(
            self._driver, stream=device.readback_stream, num_pages=num_pages
        )
        uploads = NumbersToDevice(self._driver, current_stream=current_stream, num_pages=num_pages)
        freed = self._driver.create_event()

        def freed_events() -> list[int]:
            self._driver.record_event(freed, current_stream())
            return [freed]

        allocator.attach_lane(pages, lane, uploads, freed_events, self._reserve, device.order, device.settle)
        self._allocator = allocator

    def frames(self, slots: torch.Tensor) -> Any:
        return (slots[:: self._page_tokens] // self._page_tokens).to(torch.int64).contiguous()

    def join(self, namespace: bytes) -> tuple[OwnFrameTable, Peers]:
        rank_table, own, geometry = self._rank_table, self._member_slots.own, self._geometry
        pool = _native.DevicePool(self._description().encode(), geometry.num_bytes)
        frame_table = _native.FrameTable(rank_table, own, namespace, pool, geometry.num_pages, geometry.table())
        peers = _native.Peers(rank_table, own, own, namespace, geometry.table(), pool)
        self._peers, self._mappings = peers, self._open_mappings(peers)
        order = StreamOrder(
            copy_stream=self._copy_stream,
            follow_stream=self._follow_stream,
            current_stream=current_stream,
            consumers=self._consumers,
            ready_events=self._ready_events,
        )
        reader = self._open_reader(peers, order, self._copy_ends, num_pages=geometry.num_pages, reads=self._ring)
        # It leases only what its own lookup has found; a protocol cannot say that.
        return frame_table, cast(Peers, reader)

    def _open_mappings(self, peers: _native.Peers) -> PeerMappings:
        """For all readers of this rank: what one of them can read the others can."""
        member_slots, has_part = self._member_slots, self.pins is not None
        own_rows = {member_slots.own: OWN_ROW, **({member_slots.own_arena: ARENA_ROW} if has_part else {})}
        pools = member_slots.peers if self._fetches and self.shares_pool else []
        pools = [slot for slot in pools if slot - member_slots.first_slot not in self._apart]
        return PeerMappings(
            driver=self._driver,
            places=self._places,
            page_bytes=self._page_bytes,
            alignment_bytes=self._alignment_bytes,
            announcements=peers,
            own_rows=own_rows,
            wanted_slots=[*pools, *(member_slots.arenas if self._has_arena else ())],
            executor=self._rank_device.opener,
            registrations=self._rank_device.registrations,
            prober=self._prober,
            visible_uuids={self._driver.device_uuid(device) for device in range(self._driver.num_devices())},
        )

    def arena_peers(self, namespace: bytes, block: BlockGeometry, memory: _native.SharedBytes) -> Peers:
        assert self.pins is not None
        num_frames = block.num_frames(memory.num_bytes)
        table = block.table()
        bases = [self.pins.device_address + offset for layer in table for offset, _ in layer]
        self._places.write(ARENA_ROW, bases, [block.frame_bytes] * len(bases))
        torch.cuda.synchronize()  # At a start or a weight update: two copy streams read this row.
        arena_slot = self._member_slots.own_arena
        peers = _native.Peers(self._rank_table, None, arena_slot, namespace, table, memory, block.frame_bytes)
        # What it reads was published, what it writes is leased: there is nothing on the device to wait for.
        order = StreamOrder(
            copy_stream=self._rank_device.backup_stream,
            follow_stream=self._rank_device.backup_stream,
            current_stream=current_stream,
            consumers=tuple,
            ready_events=tuple,
        )
        ends = self._rank_device.backup_ends
        return cast(Peers, self._open_reader(peers, order, ends, num_pages=num_frames, target_row=ARENA_ROW))

    def _description(self) -> PoolDescription:
        """How peers open the pool; where they cannot, a description that opens nothing, and they take the arena."""
        if not self.shares_pool:
            return PoolDescription(self._device_uuid, (), ())
        probe = (self._probe.nonce, self._probe.address, self._probe.num_bytes)
        return describe(self._driver, self._device_uuid, self._extents, probe)

    def _open_reader(
        self,
        peers: _native.Peers,
        order: StreamOrder,
        ends: LeaseWord,
        *,
        num_pages: int,
        target_row: int = OWN_ROW,
        reads: GpuIo | None = None,
    ) -> CudaPeers:
        assert self._mappings is not None
        reader = CudaPeers(
            directory=peers,
            driver=self._driver,
            kernel=self._kernel if target_row == OWN_ROW else self._backup_kernel,
            mappings=self._mappings,
            groups=self._groups,
            order=order,
            ends=ends,
            page_bytes=self._geometry.page.page_bytes,
            num_pages=num_pages,
            target_row=target_row,
            reads=reads,
        )
        self._readers.append(reader)
        self._rank_device.readers.append(reader)
        return reader

    def offload(self, slots: torch.Tensor, keys: list[str], window: Window | None = None) -> bool:
        return self._send(self._rank_device.offloads.send, slots, keys, window)

    def offer_again(self, slots: torch.Tensor, keys: list[str], window: Window) -> None:
        self._send(self._rank_device.offloads.send_again, slots, keys, window)

    def _send(self, send: Callable[..., None], slots: torch.Tensor, keys: list[str], window: Window | None) -> bool:
        numbers = self.frames(slots)
        if len(numbers) != len(keys):
            raise ValueError(f"{len(numbers)} pages for {len(keys)} keys")
        if window is not None:
            numbers = torch.cat((numbers, window[1]))
        try:
            # The events come last: behind what computes the numbers.
            send(NodeKeys(keys, None if window is None else window[0]), numbers, behind=self._ready_events())
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
        assert self._allocator is not None
        self._rank_device.settle()
        self._allocator.poll()
        if self._ring is not None:
            self._ring.poll()
        if self._timer is not None:
            self._timer.poll()
        if self._peers is None or self._mappings is None:
            return
        now_s = time.monotonic()
        if now_s >= self._next_presence_s:
            self._next_presence_s = now_s + PRESENCE_PERIOD_S
            self._mappings.attend(self._peers.present())
        self._mappings.poll()

    @property
    def num_completed(self) -> int:
        return self._rank_device.offloads.num_completed

    def pop_completed(self) -> bool:
        return self._rank_device.offloads.pop_completed()

    def give_up_offloads(self) -> None:
        self._rank_device.offloads.give_up()

    def wait_for_copies(self) -> None:
        deadline_s = time.monotonic() + READER_PATIENCE_S
        while num_under_way := sum(reader.num_under_way for reader in self._readers):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{num_under_way} copies were still under way after {READER_PATIENCE_S:g} s")
            for reader in self._readers:
                reader.poll()
            time.sleep(POLL_S)

    def leave(self) -> None:
        self.give_up_offloads()
        self.wait_for_copies()
        for reader in self._readers:
            self._rank_device.readers.remove(reader)
            reader.close()
        self._readers.clear()
        if self._mappings is not None:
            self._mappings.close()
        # The reader's place is taken again by `join`. If that fails, nobody is attended any more.
        self._peers = self._mappings = None

    def forget(self) -> None:
        self._rank_device.offloads.forget()

    def state(self) -> dict[str, int]:
        pinned = self._rank_device.pinned
        return {
            "num_pinned_host_bytes": pinned.num_bytes,
            "pinning_us": round(pinned.took_s * 1e6),
            "num_pinning_device_bytes": pinned.device_bytes,
        }

    # ---- streams -----------------------------------------------------------------------------------------------

    def _consumers(self) -> tuple[int, ...]:
        current = current_stream()
        forward = self._forward_stream.cuda_stream
        return (current,) if forward == current else (current, forward)

    def _ready_events(self) -> list[int]:
        # Held until the next call: an event that is collected is destroyed before anybody has waited for it.
        self._ready = self._record_ready()
        return [event.cuda_event for event in self._ready]


def _alignment(addresses: Sequence[int]) -> int:
    """The largest power of two, up to 256, that divides all addresses."""
    return min(256, *(address & -address for address in addresses))
