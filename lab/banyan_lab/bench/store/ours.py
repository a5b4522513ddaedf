# SPDX-License-Identifier: Apache-2.0
"""The native store, and the plain io_uring that it is held against."""

from __future__ import annotations

import time
from pathlib import Path

from banyan import _native
from banyan._native import Store
from banyan_lab.bench.store.blocks import Blocks, Shape

NUM_FILLS = 4


class Ceiling:
    """Requests of the same size to one plain file, from memory like that of the ranks' pages or from a process's own.

    The first write depth is the one that pacing allows the store.
    """

    read_depths = (16, 64)
    write_depths = (2, 8)

    def __init__(self, shape: Shape, file: Path) -> None:
        self._shape = shape
        self._file = str(file)
        self.write_s(2, "shared")

    def read_s(self, depth: int, memory: str) -> float:
        num_requests = self._shape.num_blocks * self._shape.num_layers
        return _native.store_ceiling(self._file, "read", self._shape.layer_bytes, num_requests, depth, memory)

    def write_s(self, depth: int, memory: str) -> float:
        shape = self._shape
        return _native.store_ceiling(self._file, "durable-write", shape.block_bytes, shape.num_blocks, depth, memory)


def has_ceiling() -> bool:
    """Whether the native core was built with plain io_uring to compare with: that of a checkout is, that of a wheel is
    not."""
    return hasattr(_native, "store_ceiling")


class OurStore:
    """Puts are synced; every round stores under new keys in places used before, as a full store does."""

    def __init__(self, blocks: Blocks, path: Path) -> None:
        self._blocks = blocks
        shape = blocks.shape
        quota_bytes = 3 * shape.num_bytes + (64 << 20)
        self._store = Store.open(
            [str(path)],
            b"b" * 32,
            [shape.layer_bytes] * shape.num_layers,
            quota_bytes=quota_bytes,
            floor_bytes=0,
            segment_bytes=quota_bytes // 8,
            backlog_bytes=2 * shape.num_bytes,
        )
        self._keys: list[str] = []
        self.drained_s: list[float] = []
        # Until every place has been written once, as in a store that is in use.
        for _ in range(NUM_FILLS):
            self.put_s()

    def put_s(self) -> float:
        self._store.evict(self._blocks.num_blocks)
        self._store.sync()
        self._keys = self._blocks.fresh_keys()
        start = time.perf_counter()
        self._queue(self._keys)
        if self._store.sync():
            raise RuntimeError("the store could not write")
        taken = time.perf_counter() - start
        self._store.completed()
        return taken

    def _queue(self, keys: list[str]) -> None:
        verdicts = set(self._store.put(keys, None, self._blocks.memory, self._blocks.source_offsets))
        if verdicts != {"queued"}:
            raise RuntimeError(f"the store took not all pages: {verdicts}")

    def layerwise_read_s(self) -> float:
        return self._read_s(1)

    def get_s(self) -> float:
        return self._read_s(self._blocks.shape.num_layers)

    def _read_s(self, layers_per_step: int) -> float:
        blocks = self._blocks
        blocks.forget_targets()
        # As the others read: not in the order in which the blocks were written.
        keys, targets = [self._keys[place] for place in blocks.order], blocks.target_offsets[blocks.order]
        start = time.perf_counter()
        found = self._store.lookup(keys)
        read = self._store.read(found, blocks.num_blocks, blocks.memory, targets, layers_per_step=layers_per_step)
        if failed := read.finish():
            raise RuntimeError(f"pages failed: {failed[:3]}")
        taken = time.perf_counter() - start
        blocks.check_targets()
        return taken

    def read_with_backlog_s(self) -> float:
        """A read while as many pages wait to be written; then how long the back-log takes to drain by itself."""
        keys = self._blocks.fresh_keys()
        self._queue(keys)
        taken = self._read_s(1)
        if self._store.stats()["backlog_pages"] == 0:
            raise RuntimeError("the back-log was gone before the read ended")
        start = time.perf_counter()
        while self._store.stats()["backlog_pages"]:
            time.sleep(0.005)
        self.drained_s.append(time.perf_counter() - start)
        self._store.completed()
        self._store.evict(self._blocks.num_blocks)
        self._store.sync()
        self._keys = keys
        return taken

    def close(self) -> None:
        self._store.close()
