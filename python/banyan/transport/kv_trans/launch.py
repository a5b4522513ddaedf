# SPDX-License-Identifier: Apache-2.0
"""How ``kv_trans_for_dp`` is launched: tile shape from the page sizes, grid from the share of the GPU it may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.cuda_ipc.driver import DriverError

TILE_BYTES = 32 * 1024
"""In flight for each program: half of what 64 KiB of registers for the data would allow. On an H200 16 programs move
545 GB/s with 32 KiB, 661 with 64 KiB, 358 with 16; with twice the tile half as many fit on a processor."""

MAX_WORD_BYTES = 8
"""The widest integer that Triton loads; two of them make a 16-byte access where the alignment allows it."""

MAX_ALIGNMENT_BYTES = 16
MIN_CHUNK_BYTES = 512
MAX_ITEMS = 2**30
"""The kernel counts to the end of the last tile in 32 bits."""


SM_REGISTERS = 1 << 16
"""Of a processor, in every architecture since Kepler."""

REGISTERS_AT_ONCE = 8
"""A thread gets a multiple of so many."""


def programs_per_sm(*, num_registers: int, num_warps: int, sm_threads: int) -> int:
    """Programs of a kernel that a processor runs at once. It takes no shared memory."""
    threads = 32 * num_warps
    registers = -(-num_registers // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * threads
    return max(1, min(sm_threads // threads, SM_REGISTERS // max(registers, 1)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """``num_items`` chunks of ``chunk_words`` words; both powers of two."""

    num_items: int
    chunk_words: int
    word_bytes: int
    alignment_bytes: int

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_words * self.word_bytes

    @property
    def num_warps(self) -> int:
        """So many that a thread moves 64 bytes: four accesses of 16."""
        return min(max(self.num_items * self.chunk_bytes // (32 * 64), 1), 16)

    @classmethod
    def fitting(cls, page_bytes: Sequence[int], alignment_bytes: int, tile_bytes: int = TILE_BYTES) -> TileShape:
        """The tile for pages of these sizes at addresses and strides that are multiples of ``alignment_bytes``.

        Raises:
            ValueError: when a size is not positive.
        """
        if not page_bytes or min(page_bytes) < 1:
            raise ValueError(f"no pages of {list(page_bytes)} bytes")
        common = math.gcd(alignment_bytes, *page_bytes, MAX_ALIGNMENT_BYTES)
        word_bytes = min(common, MAX_WORD_BYTES)
        page_words = -(-max(page_bytes) // word_bytes)
        # A power of two that divides the page leaves no lane idle; one that is too short would load more numbers than
        # bytes.
        chunk_words = page_words & -page_words
        if chunk_words * word_bytes < MIN_CHUNK_BYTES:
            chunk_words = 1 << (page_words - 1).bit_length()
        chunk_words = min(chunk_words, tile_bytes // word_bytes)
        return cls(max(tile_bytes // (chunk_words * word_bytes), 1), chunk_words, word_bytes, common)

    def num_chunks(self, page_bytes: int) -> int:
        return -(-page_bytes // self.chunk_bytes)

    def chunks(self, page_bytes: Sequence[int]) -> list[int]:
        """The kernel's table for extents whose pages have these sizes: extent, first word, words, chunk by chunk."""
        table = []
        for extent, size in enumerate(page_bytes):
            words = size // self.word_bytes
            for first in range(0, words, self.chunk_words):
                table += [extent, first, min(self.chunk_words, words - first)]
        return table


class KvTrans:
    """The kernel for one set of places. Implements ``banyan.transport.cuda_ipc.copies.PageKernel``.

    ``table`` is the device address of the place table, ``chunks`` that of ``TileShape.chunks`` as int32; ``on_stream``
    makes a stream the current one, for Triton.
    """

    num_registers = 0
    """Of a thread, as compiled; known once it was warmed up."""

    _compiled: Any = None
    """What Triton made of the kernel for these tiles. To find it again at each launch costs ten times the launch."""

    def __init__(
        self,
        *,
        table: int,
        chunks: int,
        page_bytes: Sequence[int],
        shape: TileShape,
        num_programs: int,
        on_stream: Callable[[int], AbstractContextManager[Any]],
        kernel: Any = None,
    ) -> None:
        self._table = table
        self._chunks = chunks
        self._num_extents = len(page_bytes)
        self._first_chunk = list(accumulate(map(shape.num_chunks, page_bytes), initial=0))
        self._shape = shape
        self.num_programs = num_programs
        self._on_stream = on_stream
        self._kernel = kernel or _kernel()
        self._word = _word_type(shape.word_bytes)

    def enqueue(self, *, stream: int, lists: PageLists, target_row: int, extents: range) -> None:
        if lists.num_pages:
            self._launch(stream, lists, target_row, extents)

    def warm_up(self, stream: int) -> None:
        """Compile before the first request needs it: a launch over no pages."""
        nothing = PageLists(self._table, self._table, self._table, 0)
        # Triton's interpreter compiles nothing.
        self._compiled = self._launch(stream, nothing, 0, range(self._num_extents))
        if self._compiled is not None:
            self.num_registers = self._compiled.n_regs
            self._launch(stream, nothing, 0, range(self._num_extents))

    def programs_per_sm(self, sm_threads: int) -> int:
        """How many a processor of so many threads runs at once."""
        return programs_per_sm(num_registers=self.num_registers, num_warps=self._shape.num_warps, sm_threads=sm_threads)

    def on_grid(self, num_programs: int) -> KvTrans:
        """The same kernel, for a lane with a grid of its own."""
        other = copy(self)
        other.num_programs = num_programs
        return other

    def _launch(self, stream: int, lists: PageLists, target_row: int, extents: range) -> Any:
        first_chunk = self._first_chunk[extents.start]
        num_chunks = self._first_chunk[extents.stop] - first_chunk
        num_items = lists.num_pages * num_chunks
        if num_items > MAX_ITEMS:
            raise DriverError("kv_trans_for_dp", f"{num_items} items in one launch, at most {MAX_ITEMS}")
        shape = self._shape
        num_tiles = -(-num_items // shape.num_items)
        num_programs = max(min(self.num_programs, num_tiles), 1)
        numbers = (
            *(self._table, self._chunks, lists.rows, lists.sources, lists.targets, target_row, lists.num_pages),
            *(self._num_extents, first_chunk, num_chunks, num_tiles),
            *(shape.num_items, shape.chunk_words, self._word, shape.word_bytes, shape.alignment_bytes),
        )
        try:
            if self._compiled is not None:
                self._compiled[(num_programs, 1, 1)](*numbers, stream=stream)
                return self._compiled
            with self._on_stream(stream):
                return self._kernel[(num_programs,)](*numbers, num_warps=shape.num_warps)
        except RuntimeError as error:
            raise DriverError("kv_trans_for_dp", str(error)) from error


def on_torch_stream(stream: int) -> AbstractContextManager[Any]:
    """Make ``stream`` torch's current one, and so Triton's; 0 is the default stream."""
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream())


def _kernel() -> Any:
    from banyan.transport.kv_trans.kernel import kv_trans_for_dp

    return kv_trans_for_dp


def _word_type(word_bytes: int) -> Any:
    import triton.language as tl

    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word_bytes]
