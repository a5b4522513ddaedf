# SPDX-License-Identifier: Apache-2.0
"""Two ranks on one fake GPU, over the real native directory. Page contents tell rank, page and extent."""

from __future__ import annotations

import ctypes

import numpy as np
from test.unit.directory.rig import NAMESPACE, frames
from test.unit.transport.fake_gpu import FakeDriver, FakeGpu, FakeKernel

from banyan import _native
from banyan.transport.cuda_ipc.copies import LayerGroups
from banyan.transport.cuda_ipc.description import describe
from banyan.transport.cuda_ipc.host_pieces import KeptPieces, Pinned
from banyan.transport.cuda_ipc.leases import LeaseWord
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.peers import CudaPeers, StreamOrder
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW, PlaceTable

NUM_PAGES = 8
NUM_LAYERS = 3
PAGE_BYTES = 16
EXTENTS = 2 * NUM_LAYERS
FRAME_BYTES = EXTENTS * PAGE_BYTES
SCHEDULE, FORWARD, COPY, FOLLOW = 1, 2, 3, 4
GEOMETRY = [
    [(extent * NUM_PAGES * PAGE_BYTES, PAGE_BYTES) for extent in (2 * layer, 2 * layer + 1)]
    for layer in range(NUM_LAYERS)
]


class GpuRank:
    """A pool on the device, its frame table, and what connects it to its peers."""

    def __init__(
        self,
        gpu: FakeGpu,
        rank_table: _native.RankTable,
        slot: int,
        layers_per_launch: int = 1,
        make_reads=lambda rank: None,
    ) -> None:
        self.gpu, self.rank_table, self.slot = gpu, rank_table, slot
        self.driver = FakeDriver(gpu)
        self.pools = [gpu.allocate(NUM_PAGES * PAGE_BYTES) for _ in range(EXTENTS)]
        for extent in range(EXTENTS):
            for page in range(NUM_PAGES):
                self.put(page, extent, self.content(page, extent))
        self.frame_table = self.announce()
        self.peers = _native.Peers(rank_table, slot, slot, NAMESPACE, GEOMETRY, self.device_pool())
        streams = self.streams = [slot * 10 + stream for stream in (SCHEDULE, FORWARD, COPY, FOLLOW)]
        self.schedule, self.forward, self.copy_stream, self.follow_stream = streams
        self.places = PlaceTable(self.driver, stream=self.copy_stream, num_peers=2, num_extents=EXTENTS)
        self.places.write(OWN_ROW, self.pools, [PAGE_BYTES] * EXTENTS)
        self.mappings = PeerMappings(
            driver=self.driver,
            places=self.places,
            page_bytes=(PAGE_BYTES,) * EXTENTS,
            alignment_bytes=8,
            announcements=self.peers,
            own_rows={slot: OWN_ROW},
            wanted_slots=range(rank_table.num_slots),
            executor=gpu.opener,
            registrations=KeptPieces(self.driver, Pinned()),
        )
        self.ready = [self.driver.create_event() for _ in range(2)]
        self.arena = gpu.allocate(NUM_PAGES * FRAME_BYTES)
        self.places.write(ARENA_ROW, [self.arena + e * PAGE_BYTES for e in range(EXTENTS)], [FRAME_BYTES] * EXTENTS)
        self.source = CudaPeers(
            directory=self.peers,
            driver=self.driver,
            kernel=FakeKernel(self.driver, self.places, (PAGE_BYTES,) * EXTENTS),
            mappings=self.mappings,
            groups=LayerGroups((2,) * NUM_LAYERS, layers_per_launch),
            order=StreamOrder(
                copy_stream=self.copy_stream,
                follow_stream=self.follow_stream,
                current_stream=lambda: self.forward,
                consumers=lambda: (self.schedule, self.forward),
                ready_events=self.record_ready,
            ),
            ends=self.make_ends(),
            page_bytes=EXTENTS * PAGE_BYTES,
            num_pages=NUM_PAGES,
            reads=make_reads(self),
        )

    def make_ends(self) -> LeaseWord:
        word = _native.SharedBytes.create(64, "ends")
        address = np.frombuffer(word, dtype=np.uint8).ctypes.data
        self.gpu.memory[address] = (ctypes.c_char * 64).from_address(address)
        return LeaseWord(_native.LeaseEnds(word), address)

    def device_pool(self) -> _native.DevicePool:
        described = describe(self.driver, bytes(16), [(base, NUM_PAGES * PAGE_BYTES) for base in self.pools])
        return _native.DevicePool(described.encode(), EXTENTS * NUM_PAGES * PAGE_BYTES)

    def announce(self) -> _native.FrameTable:
        return _native.FrameTable(self.rank_table, self.slot, NAMESPACE, self.device_pool(), NUM_PAGES, GEOMETRY)

    def record_ready(self) -> list[int]:
        for event, stream in zip(self.ready, (self.schedule, self.forward), strict=True):
            self.driver.record_event(event, stream)
        return self.ready

    def content(self, page: int, extent: int) -> bytes:
        return bytes([60 * (self.slot + 1) + page, extent] * (PAGE_BYTES // 2))

    def get(self, page: int, extent: int) -> bytes:
        return ctypes.string_at(self.pools[extent] + page * PAGE_BYTES, PAGE_BYTES)

    def put(self, page: int, extent: int, data: bytes) -> None:
        ctypes.memmove(self.pools[extent] + page * PAGE_BYTES, data, PAGE_BYTES)

    def enqueue_write(self, stream: int, page: int, data: bytes) -> None:
        """A forward pass that writes a page, one extent after the other."""
        for extent in range(EXTENTS):
            self.gpu.enqueue(stream, lambda extent=extent: self.put(page, extent, data))

    def meet_peers(self) -> None:
        """Open those who are there and close those who are not, whatever it takes."""
        self.mappings.attend(self.peers.present())
        self.gpu.opener.run()
        self.mappings.poll()
        self.gpu.run_stream(self.copy_stream)
        self.mappings.poll()

    def lease(self, names: list[str]):
        return self.source.lease(self.source.lookup(names), names)

    def targets(self, *pages: int):
        return self.gpu.buffer(pages)

    def publish(self, pages: list[int], names: list[str]) -> None:
        self.frame_table.publish(frames(*pages), names)


def make_node(seed: int = 0, layers_per_launch: int = 1) -> tuple[FakeGpu, GpuRank, GpuRank]:
    gpu = FakeGpu(seed)
    rank_table = _native.RankTable.create(2)
    owner, reader = (GpuRank(gpu, rank_table, slot, layers_per_launch) for slot in (0, 1))
    reader.meet_peers()
    return gpu, owner, reader
