# SPDX-License-Identifier: Apache-2.0
"""A rank on a GPU without the engine: pool, frame table, what connects it to its peers. What a page holds follows from
its key."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from banyan import _native
from banyan.layout import BlockGeometry
from banyan.transport.cuda_ipc.copies import LayerGroups
from banyan.transport.cuda_ipc.copy_stream import open_copy_streams
from banyan.transport.cuda_ipc.description import describe
from banyan.transport.cuda_ipc.driver import CudaDriver
from banyan.transport.cuda_ipc.gpu_io import GpuIo
from banyan.transport.cuda_ipc.host_pieces import KeptPieces, Pinned
from banyan.transport.cuda_ipc.leases import LeaseWord
from banyan.transport.cuda_ipc.mappings import PeerMappings
from banyan.transport.cuda_ipc.peers import CudaPeers, StreamOrder
from banyan.transport.cuda_ipc.places import ARENA_ROW, OWN_ROW, PlaceTable
from banyan.transport.cuda_ipc.probe import NUM_PROBE_ROWS, OwnProbe, ProbeReader
from banyan.transport.kv_trans.launch import KvTrans, TileShape, on_torch_stream
from banyan_lab.bench.gpu_pools import Shape, device_place

SHAPE = Shape("check", 4, (32768, 32768))
BLOCK = BlockGeometry(((32768, 32768),) * SHAPE.num_layers)
NUM_SLOTS, NUM_SMS = 4, 16
NUM_PAGES = 64
NUM_KEYS = 200
OPENING_S = 10.0
NAMESPACE = b"g" * 32


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def content(number: int, extent: int) -> int:
    return number * 1_000_003 + extent


class GpuRank:
    """``arena``: frames of ``BLOCK`` that the store reads into, for a rank that follows its reads."""

    def __init__(self, rank_table: _native.RankTable, slot: int, arena: _native.SharedBytes | None = None) -> None:
        self.driver = CudaDriver()
        self._pinned: list[tuple[int, _native.SharedBytes]] = []
        self.extents = [extent.view(torch.int64) for extent in device_place(SHAPE, NUM_PAGES)]
        addresses = [extent.data_ptr() for extent in self.extents]
        sizes = SHAPE.extents
        places = PlaceTable(
            self.driver,
            stream=self.driver.create_stream(),
            num_peers=2 + NUM_PROBE_ROWS,
            num_extents=len(sizes),
        )
        tile = TileShape.fitting(sizes, 256)
        self._chunks = torch.tensor(tile.chunks(sizes), dtype=torch.int32, device="cuda")
        kernel = KvTrans(
            table=places.address,
            chunks=self._chunks.data_ptr(),
            page_bytes=sizes,
            shape=tile,
            num_programs=NUM_SMS,
            on_stream=on_torch_stream,
        )
        opened = open_copy_streams(self.driver, num_sms=NUM_SMS, num_streams=2, try_stream=kernel.warm_up)
        device = self.driver.current_device()
        kernel.num_programs = opened.num_programs(kernel.programs_per_sm(self.driver.threads_per_sm(device)))
        self.copy_stream, follow_stream = opened.streams
        self.forward = torch.cuda.Stream()
        places.stream = self.copy_stream
        places.write(OWN_ROW, addresses, sizes)
        self._announce(rank_table, slot, addresses)
        self.opener = ThreadPoolExecutor(1)
        self.mappings = PeerMappings(
            driver=self.driver,
            places=places,
            page_bytes=sizes,
            alignment_bytes=tile.alignment_bytes,
            announcements=self.peers,
            own_rows={slot: OWN_ROW},
            wanted_slots=range(NUM_SLOTS),
            executor=self.opener,
            registrations=KeptPieces(self.driver, Pinned()),
            prober=ProbeReader(self.driver, kernel, places, num_bytes=sizes[0]),
        )
        self.io: GpuIo | None = None
        if arena is not None:
            self._place_arena(places, arena)
        self.source = CudaPeers(
            directory=self.peers,
            driver=self.driver,
            kernel=kernel,
            mappings=self.mappings,
            groups=LayerGroups((2,) * SHAPE.num_layers, 2),
            order=StreamOrder(
                copy_stream=self.copy_stream,
                follow_stream=follow_stream,
                current_stream=lambda: self.forward.cuda_stream,
                consumers=lambda: (self.forward.cuda_stream,),
                ready_events=self._ready,
            ),
            ends=self._make_ends(),
            page_bytes=SHAPE.block_bytes,
            num_pages=NUM_PAGES,
            reads=self.io,
        )
        torch.cuda.synchronize()

    def _announce(self, rank_table: _native.RankTable, slot: int, addresses: list[int]) -> None:
        probe = OwnProbe(self.driver, stream=self.copy_stream, num_bytes=SHAPE.extents[0])
        torch.cuda.synchronize()
        placed = [(address, NUM_PAGES * size) for address, size in zip(addresses, SHAPE.extents, strict=True)]
        announced = (probe.nonce, probe.address, probe.num_bytes)
        device_uuid = self.driver.device_uuid(self.driver.current_device())
        description = describe(self.driver, device_uuid, placed, announced)
        pool = _native.DevicePool(description.encode(), NUM_PAGES * SHAPE.block_bytes)
        geometry = [
            [((2 * layer + side) * NUM_PAGES * 32768, 32768) for side in (0, 1)] for layer in range(SHAPE.num_layers)
        ]
        self.frame_table = _native.FrameTable(rank_table, slot, NAMESPACE, pool, NUM_PAGES, geometry)
        self.peers = _native.Peers(rank_table, slot, slot, NAMESPACE, geometry, pool)

    def _place_arena(self, places: PlaceTable, arena: _native.SharedBytes) -> None:
        address = self._pin(arena)
        bases = [address + offset for layer in BLOCK.table() for offset, _ in layer]
        places.write(ARENA_ROW, bases, [BLOCK.frame_bytes] * len(bases))
        words = _native.SharedBytes.create(NUM_SLOTS * _native.FlagRing.SLOT_BYTES, "gpu-check-ring")
        ring = _native.FlagRing(words, NUM_SLOTS)
        self.io = GpuIo(self.driver, ring, self._pin(words), frame_bytes=BLOCK.frame_bytes)

    def _make_ends(self) -> LeaseWord:
        word = _native.SharedBytes.create(64, "gpu-check-ends")
        return LeaseWord(_native.LeaseEnds(word), self._pin(word))

    def _pin(self, memory: _native.SharedBytes) -> int:
        start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self._pinned.append((start, memory))
        return self.driver.register_host(start, memory.num_bytes)

    def close(self) -> None:
        """Let go of the host's memory: what the driver still knows of an address, it refuses to pin again."""
        while self._pinned:
            self.driver.unregister_host(self._pinned.pop()[0])

    def _ready(self) -> list[int]:
        self._events = [torch.cuda.Event()]
        self._events[0].record(self.forward)
        return [self._events[0].cuda_event]

    def meet_peers(self) -> None:
        """Open who is there, and wait until they can be read."""
        self.mappings.attend(self.peers.present())
        slots = [slot for slot, _epoch in self.peers.present()]
        deadline = time.monotonic() + OPENING_S
        while self.mappings.reachable(slots) != slots:
            assert time.monotonic() < deadline, "a peer cannot be opened: see the log"
            self.mappings.poll()
            time.sleep(0.001)

    def write(self, page: int, number: int) -> None:
        for extent, words in enumerate(self.extents):
            words[page].fill_(content(number, extent))

    def mismatches(self, page: int, number: int) -> torch.Tensor:
        """Words of a page that are not those of the key, counted on the device."""
        return sum((words[page] != content(number, extent)).sum() for extent, words in enumerate(self.extents))


def own(rank_table_path: str, gpu: str) -> None:
    """Evict and write pages for ever, whatever peers are reading; a line when there is something to fetch."""
    torch.cuda.set_device(int(gpu))
    torch.zeros(1, device="cuda")
    rank = GpuRank(_native.RankTable.open(rank_table_path), 0)
    chance, held = random.Random(1), {}
    free = list(range(NUM_PAGES))
    num_written = 0
    while True:
        free += np.frombuffer(rank.frame_table.drain(), dtype=np.int64).tolist()
        while len(free) < NUM_PAGES // 2 and held:
            number = chance.choice(list(held))
            free += np.frombuffer(rank.frame_table.retire(np.array([held.pop(number)])), dtype=np.int64).tolist()
        page, number = free.pop(), chance.randrange(NUM_KEYS)
        if number in held:
            free.append(page)
            continue
        rank.write(page, number)
        torch.cuda.synchronize()
        rank.frame_table.publish(np.array([page]), [key(number)])
        held[number] = page
        num_written += 1
        if num_written == 100:
            print(num_written, flush=True)  # The reader may begin; nobody reads on.


if __name__ == "__main__":
    own(*sys.argv[1:])
