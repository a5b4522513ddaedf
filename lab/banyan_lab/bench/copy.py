# SPDX-License-Identifier: Apache-2.0
"""Scattered pages through the native copy, against one memcpy of as many bytes between the same kind of buffers.

One process, one copying thread at a time, shared memory on both sides, data larger than the caches, the two in turn.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

NAMESPACE = b"b" * 32
NUM_ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    """K and V extents of `page_bytes` a page in each layer; `num_frames` in the pool, `num_pages` of them copied."""

    geometry: str
    num_layers: int
    page_bytes: int
    num_frames: int
    num_pages: int

    @property
    def extents(self) -> list[list[tuple[int, int]]]:
        extent_bytes = self.num_frames * self.page_bytes
        return [
            [((2 * layer + side) * extent_bytes, self.page_bytes) for side in (0, 1)]
            for layer in range(self.num_layers)
        ]

    @property
    def pool_bytes(self) -> int:
        return 2 * self.num_layers * self.num_frames * self.page_bytes

    @property
    def copied_bytes(self) -> int:
        return 2 * self.num_layers * self.num_pages * self.page_bytes


SHAPES = (
    Shape("A: 30 layers, page 16, 3 x 64 bf16", 30, 6_144, 2_000, 1_000),
    Shape("B: 80 layers, page 64, 8 x 128 bf16", 80, 131_072, 32, 16),
)


def run() -> list[dict[str, Any]]:
    """One row per geometry; medians over the rounds, GB/s of bytes copied (each read once and written once)."""
    return [_measure(shape) for shape in SHAPES]


def _measure(shape: Shape) -> dict[str, Any]:
    rank_table = RankTable.create(2)
    pools = [_touched_pool(shape, slot) for slot in (0, 1)]
    frame_table = FrameTable(rank_table, 0, NAMESPACE, pools[0], shape.num_frames, shape.extents)
    peers = Peers(rank_table, 1, 1, NAMESPACE, shape.extents, pools[1])
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(shape.num_pages)]
    place = np.random.default_rng(0)
    copy_s, memcpy_s = [], []
    for round_number in range(NUM_ROUNDS):
        frame_table.reset()
        frame_table.publish(place.permutation(shape.num_frames)[: shape.num_pages], keys)
        copied = _copy_s(peers, keys, place.permutation(shape.num_frames)[: shape.num_pages])
        plain = _memcpy_s(pools[0], pools[1], shape, second_half=round_number % 2 == 1)
        copy_s.append(copied)
        memcpy_s.append(plain)
    copy_gbps, memcpy_gbps = (shape.copied_bytes / statistics.median(s) / 1e9 for s in (copy_s, memcpy_s))
    return {
        "geometry": shape.geometry,
        "page_bytes": shape.page_bytes,
        "num_pages": shape.num_pages,
        "copied_bytes": shape.copied_bytes,
        "num_rounds": NUM_ROUNDS,
        "copy_gbps": copy_gbps,
        "memcpy_gbps": memcpy_gbps,
        "ratio": copy_gbps / memcpy_gbps,
    }


def _touched_pool(shape: Shape, slot: int) -> SharedBytes:
    """Filled, so that no page fault is left for the measurement."""
    pool = SharedBytes.create(shape.pool_bytes, f"bench-{slot}")
    np.frombuffer(pool, dtype=np.uint64)[:] = slot + 1
    return pool


def _copy_s(peers: Peers, keys: list[str], targets: np.ndarray) -> float:
    lease = peers.lease(peers.lookup(keys), keys)
    assert lease is not None
    start = time.perf_counter()
    assert peers.start_copy([(lease, targets)]).finish()
    return time.perf_counter() - start


def _memcpy_s(source: SharedBytes, target: SharedBytes, shape: Shape, second_half: bool) -> float:
    offset = shape.pool_bytes - shape.copied_bytes if second_half else 0
    addresses = [np.frombuffer(pool, dtype=np.uint8).ctypes.data + offset for pool in (target, source)]
    start = time.perf_counter()
    ctypes.memmove(addresses[0], addresses[1], shape.copied_bytes)
    return time.perf_counter() - start
