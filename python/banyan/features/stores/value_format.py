# SPDX-License-Identifier: Apache-2.0
"""What one page is in a store that keeps values by name: a header with a checksum for each layer, then the layers.

A checksum is bound to the page's key, its namespace and the layer's number, so a value that was cut, mixed up with
another one or changed in any bit is told from the page. The header needs no checksum of its own: with wrong sums no
layer agrees. The format stands in docs/format.md.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from banyan._native import SharedBytes

MAGIC = b"BANYANV1"
HEAD = struct.Struct("<8sQQ")
ALIGN_BYTES = 4096
"""Of the header, so that the layers behind it lie where O_DIRECT wants them."""


@dataclass(frozen=True)
class ValueFormat:
    """The value of a page whose layers have so many bytes."""

    layer_bytes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    @cached_property
    def starts(self) -> list[int]:
        """Where each layer begins in the page, and the page's end."""
        return [0, *accumulate(self.layer_bytes)]

    @property
    def page_bytes(self) -> int:
        return self.starts[-1]

    @cached_property
    def header_bytes(self) -> int:
        return -(-(HEAD.size + 8 * self.num_layers) // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def value_bytes(self) -> int:
        return self.header_bytes + self.page_bytes

    @property
    def is_aligned(self) -> bool:
        """Whether every layer begins where O_DIRECT wants it."""
        return all(num_bytes % ALIGN_BYTES == 0 for num_bytes in self.layer_bytes)

    def steps(self, layers_per_step: int, least_bytes: int) -> list[range]:
        """The layers of each step of a read: so many, and no fewer than ``least_bytes`` of a page."""
        steps, first = [], 0
        while first < self.num_layers:
            end = min(first + max(1, layers_per_step), self.num_layers)
            while end < self.num_layers and self.starts[end] - self.starts[first] < least_bytes:
                end += 1
            steps.append(range(first, end))
            first = end
        return steps

    def layer_sums(
        self, memory: SharedBytes, namespace: bytes, keys: Sequence[str], offsets: Sequence[int], layer: int
    ) -> list[int]:
        """The checksum of one layer of each page; page ``i`` begins at byte ``offsets[i]``."""
        places = array("q", [offset + self.starts[layer] for offset in offsets])
        return memory.checksums(namespace, list(keys), places, self.layer_bytes[layer], layer)

    def write_header(self, header: memoryview, sums: Sequence[int]) -> None:
        HEAD.pack_into(header, 0, MAGIC, self.page_bytes, self.num_layers)
        struct.pack_into(f"<{self.num_layers}Q", header, HEAD.size, *sums)

    def sums_of(self, header: memoryview) -> tuple[int, ...] | None:
        """What a header says; None where it is of no page of this format."""
        if HEAD.unpack_from(header) != (MAGIC, self.page_bytes, self.num_layers):
            return None
        return struct.unpack_from(f"<{self.num_layers}Q", header, HEAD.size)


class HeaderBuffer:
    """Room for the headers of some pages, at an address that a library may be given."""

    def __init__(self, value_format: ValueFormat, num_headers: int) -> None:
        self._header_bytes = value_format.header_bytes
        self._memory = mmap.mmap(-1, num_headers * value_format.header_bytes)
        self.num_headers = num_headers
        self.num_bytes = len(self._memory)
        self.address = address_of(self._memory)

    def place(self, number: int) -> int:
        """The address of a header."""
        return self.address + number * self._header_bytes

    def view(self, number: int) -> memoryview:
        start = number * self._header_bytes
        return memoryview(self._memory)[start : start + self._header_bytes]


def address_of(memory: SharedBytes | mmap.mmap) -> int:
    """Where memory that stays mapped lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
