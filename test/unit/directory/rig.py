# SPDX-License-Identifier: Apache-2.0
"""Ranks of a small node in one process."""

from __future__ import annotations

import hashlib

import numpy as np

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

NUM_FRAMES = 16
NUM_LAYERS = 3
PAGE_BYTES = 128
NAMESPACE = b"n" * 32


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def frames(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def ids(freed: bytes) -> list[int]:
    return np.frombuffer(freed, dtype=np.int64).tolist()


def geometry(num_frames: int = NUM_FRAMES, page_bytes: int = PAGE_BYTES) -> list[list[tuple[int, int]]]:
    """K and V of each layer, one after the other."""
    extent_bytes = num_frames * page_bytes
    return [
        [(2 * layer * extent_bytes, page_bytes), ((2 * layer + 1) * extent_bytes, page_bytes)]
        for layer in range(NUM_LAYERS)
    ]


class Rank:
    """A pool filled with bytes that tell rank and place, its frame table, and its view of the others."""

    def __init__(
        self,
        rank_table: RankTable,
        slot: int,
        num_frames: int = NUM_FRAMES,
        page_bytes: int = PAGE_BYTES,
        namespace: bytes = NAMESPACE,
    ) -> None:
        self.geometry = geometry(num_frames, page_bytes)
        self.pool = SharedBytes.create(2 * NUM_LAYERS * num_frames * page_bytes, f"pool-{slot}")
        self.bytes = np.frombuffer(self.pool, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(slot).integers(0, 256, self.bytes.size, dtype=np.uint8)
        self.frame_table = FrameTable(rank_table, slot, namespace, self.pool, num_frames, self.geometry)
        self.peers = Peers(rank_table, slot, slot, namespace, self.geometry, self.pool)

    def page(self, frame: int, layer: int) -> bytes:
        extents = self.geometry[layer]
        return b"".join(self.bytes[base + frame * size :][:size].tobytes() for base, size in extents)

    def pages(self, frame: int) -> list[bytes]:
        return [self.page(frame, layer) for layer in range(NUM_LAYERS)]
