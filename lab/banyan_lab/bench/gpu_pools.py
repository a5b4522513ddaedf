# SPDX-License-Identifier: Apache-2.0
"""Pools on a GPU for measurements and checks: places of random bytes, the table of them, and the page kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.kv_trans.launch import TILE_BYTES, KvTrans, TileShape, on_torch_stream


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's cache: ``page_bytes`` of each buffer of one layer."""

    name: str
    num_layers: int
    page_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * sum(self.page_bytes)

    @property
    def extents(self) -> tuple[int, ...]:
        return self.page_bytes * self.num_layers


def model_shapes(page_tokens: int) -> list[Shape]:
    """The geometries that the copy is judged by, in bf16: GQA of an 8B and a 70B model, and MLA."""
    row = page_tokens * 8 * 128 * 2
    return [
        Shape(f"8B, page {page_tokens}", 32, (row, row)),
        Shape(f"70B, page {page_tokens}", 80, (row, row)),
        Shape(f"MLA, page {page_tokens}", 61, (page_tokens * 576 * 2,)),
    ]


class Pools:
    """Places of one shape, each a list of uint8 tensors ``[num_pages, page_bytes]``, and launches over them."""

    def __init__(self, shape: Shape, places: Sequence[Sequence[Any]]) -> None:
        import torch

        self.shape = shape
        self.places = places
        pairs = [[[e.data_ptr() for e in place], [e.stride(0) for e in place]] for place in places]
        self.table = torch.tensor(pairs, dtype=torch.int64, device="cuda")
        self._numbers = [number for place in pairs for row in place for number in row]

    def kernel(self, *, num_programs: int, tile_bytes: int = TILE_BYTES) -> KvTrans:
        import torch

        alignment_bytes = math.gcd(*self._numbers)
        tile = TileShape.fitting(self.shape.extents, alignment_bytes, tile_bytes)
        self.chunks = torch.tensor(tile.chunks(self.shape.extents), dtype=torch.int32, device="cuda")
        return KvTrans(
            table=self.table.data_ptr(),
            chunks=self.chunks.data_ptr(),
            page_bytes=self.shape.extents,
            shape=tile,
            num_programs=num_programs,
            on_stream=on_torch_stream,
        )


def device_place(shape: Shape, num_pages: int) -> list[Any]:
    """A pool as SGLang makes it: the buffers of a layer are the parts of one tensor."""
    import torch

    extents: list[Any] = []
    for _ in range(shape.num_layers):
        flat = torch.randint(0, 256, (num_pages * sum(shape.page_bytes),), dtype=torch.uint8, device="cuda")
        parts = flat.split([num_pages * size for size in shape.page_bytes])
        extents += [part.view(num_pages, size) for part, size in zip(parts, shape.page_bytes, strict=True)]
    return extents


def arena_place(shape: Shape, num_frames: int) -> list[Any]:
    """Full Blocks in pinned memory of the host, which the device reaches under the same address."""
    import torch

    blocks = torch.zeros((num_frames, shape.block_bytes), dtype=torch.uint8, pin_memory=True)
    return list(blocks.split(list(shape.extents), dim=1))


class Lists:
    """Page lists on the device; kept alive by this object."""

    def __init__(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        import torch

        self._lists = torch.tensor([list(rows), list(sources), list(targets)], dtype=torch.int64, device="cuda")
        start, size = self._lists.data_ptr(), 8 * len(rows)
        self.lists = PageLists(rows=start, sources=start + size, targets=start + 2 * size, num_pages=len(rows))
