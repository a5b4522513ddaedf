# SPDX-License-Identifier: Apache-2.0
"""A read that comes in the middle of a prefill, beside writes that the prefill leaves room for.

What may be written is told once for the whole forward, as servers do, or anew for each layer. Forwards of either kind,
and of one that lets nothing be written, take turns; each has a read of some pages begin at a moment of its own.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from banyan._native import Store
from banyan_lab.bench.store.blocks import SHAPES, Blocks
from banyan_lab.bench.store.provenance import describe

SHAPE = SHAPES[1]
LAYER_S = 0.005
NUM_FORWARDS = 40
NUM_READ_BLOCKS = 16
NUM_WARM_UPS = 3
WAYS = ("nothing is written", "one permit", "a permit for each layer")
SETTLE_S = 0.05
"""Until what was being written when a forward ended is durable, and counted."""


class Prefills:
    """Forwards of ``SHAPE.num_layers`` layers that compute nothing, above a store with more to write than fits."""

    def __init__(self, path: Path) -> None:
        self._blocks = blocks = Blocks(SHAPE)
        quota_bytes = 3 * SHAPE.num_bytes + (64 << 20)
        self._store = Store.open(
            [str(path)],
            b"b" * 32,
            [SHAPE.layer_bytes] * SHAPE.num_layers,
            quota_bytes=quota_bytes,
            floor_bytes=0,
            segment_bytes=quota_bytes // 8,
            backlog_bytes=2 * SHAPE.num_bytes,
        )
        self._reader = ThreadPoolExecutor(1)
        self._stored: list[str] = []
        self._queue(blocks.fresh_keys())
        self.bytes_per_s = SHAPE.num_bytes / self._drain_s()

    def _queue(self, keys: list[str]) -> None:
        self._queued = keys
        verdicts = set(self._store.put(keys, None, self._blocks.memory, self._blocks.source_offsets))
        if verdicts != {"queued"}:
            raise RuntimeError(f"the store took not all pages: {verdicts}")

    def _drain_s(self) -> float:
        """Let what is queued be written, and forget what was stored before; the seconds that the writes took."""
        start = time.perf_counter()
        self._store.open_writes()
        if self._store.sync():
            raise RuntimeError("the store could not write")
        taken = time.perf_counter() - start
        self._store.completed()
        self._store.drop(self._stored)
        self._stored = self._queued
        return taken

    def run(self, way: str, read_after_s: float) -> tuple[float, int]:
        """One forward; how long its read took, and how many bytes were written meanwhile."""
        self._store.pause_writes()
        self._queue(self._blocks.fresh_keys())
        budget_bytes = int(self.bytes_per_s * LAYER_S * SHAPE.num_layers)
        written_bytes = self._store.stats()["written_bytes"]
        reading = self._reader.submit(self._read_s, read_after_s)
        if way == "one permit":
            self._store.set_write_budget(budget_bytes)
        begun = time.perf_counter()
        for layer in range(SHAPE.num_layers):
            if way == "a permit for each layer":
                self._store.set_write_budget(budget_bytes // SHAPE.num_layers)
            time.sleep(max(0.0, begun + (layer + 1) * LAYER_S - time.perf_counter()))
        self._store.pause_writes()
        read_s = reading.result()
        time.sleep(SETTLE_S)
        written_bytes = self._store.stats()["written_bytes"] - written_bytes
        self._drain_s()
        return read_s, written_bytes

    def _read_s(self, after_s: float) -> float:
        time.sleep(after_s)
        start = time.perf_counter()
        found = self._store.lookup(self._stored[:NUM_READ_BLOCKS])
        read = self._store.read(
            found, NUM_READ_BLOCKS, self._blocks.memory, self._blocks.target_offsets[:NUM_READ_BLOCKS]
        )
        if failed := read.finish():
            raise RuntimeError(f"pages failed: {failed[:3]}")
        return time.perf_counter() - start

    def close(self) -> None:
        self._reader.shutdown()
        self._store.close()


def run(path: str) -> dict[str, Any]:
    """Measure below ``path``; leaves nothing behind."""
    drawn = random.Random(0)
    seen: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=path, prefix="banyan-bench-") as folder:
        prefills = Prefills(Path(folder))
        for number in range(NUM_WARM_UPS + NUM_FORWARDS):
            # The same moment for each way, so that only the way differs.
            after_s = drawn.random() * LAYER_S * SHAPE.num_layers
            for way in drawn.sample(WAYS, len(WAYS)):
                measured = prefills.run(way, after_s)
                if number >= NUM_WARM_UPS:
                    seen[way].append(measured)
        bytes_per_s = prefills.bytes_per_s
        prefills.close()
    rows = [{"way": way, **_row(some)} for way, some in seen.items()]
    shape = {"block": SHAPE.name, "num_layers": SHAPE.num_layers, "layer_ms": LAYER_S * 1e3}
    read = {"read_mib": NUM_READ_BLOCKS * SHAPE.block_bytes / 2**20, "write_gbps": bytes_per_s / 1e9}
    return {**shape, **read, "rows": rows, **describe(path), "command": "banyan bench permits --path DIR --json"}


def _row(some: list[tuple[float, int]]) -> dict[str, Any]:
    def at(pick: Callable[[list[float]], float]) -> float:
        return pick([1e3 * read_s for read_s, _ in some])

    return {
        "num_forwards": len(some),
        "read_ms": at(statistics.median),
        "read_p90_ms": at(lambda values: statistics.quantiles(values, n=10)[-1]),
        "read_most_ms": at(max),
        "written_mib": statistics.median(num_bytes for _, num_bytes in some) / 2**20,
    }
