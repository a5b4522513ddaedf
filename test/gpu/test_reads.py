# SPDX-License-Identifier: Apache-2.0
"""Pages of a real store go up to the GPU layer by layer, while they are read and after a page has failed."""

import time

import numpy as np
import pytest
import torch
from test.gpu.gpu_ranks import BLOCK, NAMESPACE, NUM_PAGES, SHAPE, GpuRank, content, key

from banyan import _native

NUM_STORED = 32
READ_BYTES_PER_S = 50_000_000
"""So slow that a read of all pages takes a sixth of a second: the streams have to wait."""


class Rig:
    def __init__(self, folder):
        self.arena = _native.SharedBytes.create(NUM_PAGES * BLOCK.frame_bytes, "gpu-check-arena")
        self.frames = np.frombuffer(self.arena, dtype=np.int64).reshape(NUM_PAGES, -1)
        self.rank = GpuRank(_native.RankTable.create(2), 0, self.arena)
        self.folder = folder
        self.store = self.open()
        self.names = [key(number) for number in range(NUM_STORED)]
        words = BLOCK.table()[0][0][1] // 8
        for number in range(NUM_STORED):
            for layer, extents in enumerate(BLOCK.table()):
                for side, (offset, _) in enumerate(extents):
                    self.frames[number, offset // 8 : offset // 8 + words] = content(number, 2 * layer + side)
        assert set(self.store.put(self.names, None, self.arena, self.offsets(range(NUM_STORED)))) == {"queued"}
        assert self.store.sync() == 0
        self.frames[:] = -1
        # A kernel is loaded when it runs first, and loading may wait for streams: not behind a read.
        torch.stack([(self.rank.extents[0][0] != content(0, 0)).sum()])
        torch.cuda.synchronize()

    def open(self):
        return _native.Store.open(
            [str(self.folder)],
            NAMESPACE,
            BLOCK.layer_bytes,
            quota_bytes=256 << 20,
            floor_bytes=0,
            read_bytes_per_s=READ_BYTES_PER_S,
        )

    def offsets(self, frames):
        return np.array(list(frames), dtype=np.int64) * BLOCK.frame_bytes

    def read(self):
        """All pages, each into another frame than it came from."""
        found = self.store.lookup(self.names)
        assert found.num_pages == NUM_STORED
        places = self.offsets(range(NUM_STORED, 2 * NUM_STORED))
        return self.store.read(found, NUM_STORED, self.arena, places, layers_per_step=1)

    def poll(self):
        deadline = time.monotonic() + 10
        while self.rank.source.num_under_way or self.rank.io._passed:
            assert time.monotonic() < deadline
            self.rank.source.poll()
            self.rank.io.poll()


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.store.close()
    torch.cuda.synchronize()
    made.rank.close()


def copy(rank, read, positions, pages):
    return rank.source.start_copy([], [(read, positions, torch.tensor(pages, device="cuda"))])


def test_pages_when_they_are_still_being_read_then_the_forward_behind_them_sees_every_word(rig):
    rank, chance = rig.rank, np.random.default_rng(0)
    for _ in range(3):
        positions = chance.permutation(NUM_STORED).tolist()
        pages = chance.permutation(NUM_PAGES)[:NUM_STORED].tolist()
        read = rig.read()
        under_way = copy(rank, read, positions, pages)
        wrong = []
        with torch.cuda.stream(rank.forward):
            for layer in range(SHAPE.num_layers):
                under_way.wait_layer(layer)
                for page, position in zip(pages, positions, strict=True):
                    for extent in (2 * layer, 2 * layer + 1):
                        wrong.append((rank.extents[extent][page] != content(position, extent)).sum())
        assert not read.has_ended, "nobody has waited for the drive"
        assert under_way.finish() and read.finish() == []
        torch.cuda.synchronize()
        assert int(torch.stack(wrong).sum()) == 0
        rig.poll()
        rig.frames[:] = -1


def test_streams_when_a_page_fails_then_they_go_on_and_the_read_names_it(rig):
    for path in rig.folder.rglob("*"):
        if path.is_file() and "segment" in path.name:
            damaged = np.fromfile(path, dtype=np.uint8)
            damaged[4096 + 17 :: 512] ^= 0xFF
            damaged.tofile(path)
    read = rig.read()
    under_way = copy(rig.rank, read, list(range(NUM_STORED)), list(range(NUM_STORED)))
    under_way.finish()
    assert any(reason == "checksum" for _, reason in read.finish())
    torch.cuda.synchronize()
    rig.poll()
