# SPDX-License-Identifier: Apache-2.0
"""The Full Block: one page, all layers, as it rests in the host arena and in the store.

Layers lie one after another without gaps, and within a layer its parts (K, V). So a Layer Block is one contiguous
extent, and what the store reads lands where the arena wants it. Frames start on memory pages, for direct I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan.layout.geometry import ALIGNMENT_BYTES
from banyan.layout.page import PageLayout

STORE_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """``buffer_bytes[layer][buffer]``: the size of one page of each buffer of each layer."""

    buffer_bytes: tuple[tuple[int, ...], ...]

    @classmethod
    def of_page(cls, page: PageLayout) -> BlockGeometry:
        """The block that holds one page."""
        return cls(page.sizes)

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each Layer Block."""
        return [sum(sizes) for sizes in self.buffer_bytes]

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def record_bytes(self) -> int:
        """What one page takes in a segment of the store: a header, and each layer on a boundary (docs/format.md)."""
        return STORE_ALIGNMENT_BYTES + sum(
            -(-layer_bytes // STORE_ALIGNMENT_BYTES) * STORE_ALIGNMENT_BYTES for layer_bytes in self.layer_bytes
        )

    @property
    def frame_bytes(self) -> int:
        """Bytes from one frame to the next."""
        return -(-self.block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def num_frames(self, num_bytes: int) -> int:
        """Frames that fit into ``num_bytes``."""
        return num_bytes // self.frame_bytes

    def table(self) -> list[list[tuple[int, int]]]:
        """``(offset_bytes, page_bytes)`` in a frame, for each buffer of each layer: the form the native core takes."""
        offset = 0
        layers = []
        for sizes in self.buffer_bytes:
            layer = []
            for size in sizes:
                layer.append((offset, size))
                offset += size
            layers.append(layer)
        return layers
