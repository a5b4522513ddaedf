# SPDX-License-Identifier: Apache-2.0
"""What is stored: pages of real models, filled with noise, in one arena."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from banyan._native import SharedBytes

BYTES_IN_ALL = 384 << 20


@dataclass(frozen=True)
class Shape:
    """A Full Block: ``num_layers`` layers of ``layer_bytes``."""

    name: str
    num_layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def num_blocks(self) -> int:
        return BYTES_IN_ALL // self.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


SHAPES = (
    Shape("SmolLM2-135M, 16 tokens", 30, 16 * 2 * 3 * 64 * 2),
    Shape("8B, 16 tokens", 32, 16 * 2 * 8 * 128 * 2),
    Shape("70B, 64 tokens", 80, 64 * 2 * 8 * 128 * 2),
    Shape("MLA, 64 tokens", 61, 64 * 576 * 2),
)
"""Tokens x (K and V) x heads x head size x 2 bytes; MLA: tokens x latent x 2 bytes."""


class Blocks:
    """``frames[:num_blocks]`` are the pages to store, ``frames[num_blocks:]`` where they are read to."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.num_blocks = shape.num_blocks
        self.memory = SharedBytes.create(2 * shape.num_bytes, "bench")
        self.frames = np.frombuffer(self.memory, dtype=np.uint8).reshape(2 * self.num_blocks, shape.block_bytes)
        words = np.frombuffer(self.memory, dtype=np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 1 << 63, len(words), dtype=np.uint64)
        self.sources = self.frames[: self.num_blocks]
        self.targets = self.frames[self.num_blocks :]
        starts = np.arange(2 * self.num_blocks, dtype=np.int64) * shape.block_bytes
        self.source_offsets, self.target_offsets = starts[: self.num_blocks], starts[self.num_blocks :]
        self.order = np.random.default_rng(1).permutation(self.num_blocks)
        self._num_key_sets = 0

    def fresh_keys(self) -> list[str]:
        """Keys that nobody has stored yet, for the same content."""
        self._num_key_sets += 1
        return [hashlib.sha256(f"{self._num_key_sets}/{n}".encode()).hexdigest() for n in range(self.num_blocks)]

    def forget_targets(self) -> None:
        self.targets[:, ::4096] = 0

    def check_targets(self) -> None:
        """What was read is what was stored; a benchmark of wrong bytes would be worthless."""
        if not np.array_equal(self.sources[:, ::64], self.targets[:, ::64]):
            raise RuntimeError("a store returned other bytes than were put")
