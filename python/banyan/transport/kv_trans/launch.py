# SPDX-License-Identifier: Apache-2.0
"""How ``kv_trans_for_dp`` is launched: tile shape from the page sizes, grid from the share of the GPU it may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from banyan.transport.cuda_ipc.copies import PageLists
from banyan.transport.cuda_ipc.driver import DriverError

TILE_BYTES = 32 * 1024
"""In flight for each program. Not measured yet: half of what 64 KiB of registers for the data would allow."""

MAX_WORD_BYTES = 8
"""The widest integer that Triton loads; two of them make a 16-byte access where the alignment allows it."""

MAX_ALIGNMENT_BYTES = 16
MIN_CHUNK_BYTES = 512
MAX_ITEMS = 2**30
"""The kernel counts to the end of the last tile in 32 bits."""


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


class KvTrans:
    """The kernel for one set of places. Implements ``banyan.transport.cuda_ipc.copies.PageKernel``.

    ``table`` is the device address of the place table, ``page_words`` that of one int64 for each extent;
    ``on_stream`` makes a stream the current one, for Triton.
    """

    def __init__(
        self,
        *,
        table: int,
        page_words: int,
        page_bytes: Sequence[int],
        shape: TileShape,
        num_programs: int,
        on_stream: Callable[[int], AbstractContextManager[Any]],
        kernel: Any = None,
    ) -> None:
        self._table = table
        self._page_words = page_words
        self._page_bytes = tuple(page_bytes)
        self._shape = shape
        self.num_programs = num_programs
        self._on_stream = on_stream
        self._kernel = kernel or _compiled()
        self._word = _word_type(shape.word_bytes)

    def enqueue(self, *, stream: int, lists: PageLists, target_row: int, extents: range) -> None:
        if lists.num_pages:
            self._launch(stream, lists, target_row, extents)

    def warm_up(self, stream: int) -> None:
        """Compile before the first request needs it: a launch over no pages."""
        nothing = PageLists(self._table, self._table, self._table, 0)
        self._launch(stream, nothing, 0, range(len(self._page_bytes)))

    def _launch(self, stream: int, lists: PageLists, target_row: int, extents: range) -> None:
        chunks_per_page = max(-(-self._page_bytes[extent] // self._shape.chunk_bytes) for extent in extents)
        num_items = lists.num_pages * len(extents) * chunks_per_page
        if num_items > MAX_ITEMS:
            raise DriverError("kv_trans_for_dp", f"{num_items} items in one launch, at most {MAX_ITEMS}")
        num_tiles = -(-num_items // self._shape.num_items)
        try:
            with self._on_stream(stream):
                self._kernel[(max(min(self.num_programs, num_tiles), 1),)](
                    self._table,
                    self._page_words,
                    lists.rows,
                    lists.sources,
                    lists.targets,
                    target_row,
                    lists.num_pages,
                    len(self._page_bytes),
                    extents.start,
                    len(extents),
                    chunks_per_page,
                    num_tiles,
                    ITEMS=self._shape.num_items,
                    CHUNK_WORDS=self._shape.chunk_words,
                    WORD=self._word,
                    WORD_BYTES=self._shape.word_bytes,
                    ALIGNMENT_BYTES=self._shape.alignment_bytes,
                    num_warps=self._shape.num_warps,
                )
        except RuntimeError as error:
            raise DriverError("kv_trans_for_dp", str(error)) from error


def on_torch_stream(stream: int) -> AbstractContextManager[Any]:
    """Make ``stream`` torch's current one, and so Triton's; 0 is the default stream."""
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream())


def _compiled() -> Any:
    from banyan.transport.kv_trans.kernel import kv_trans_for_dp

    return kv_trans_for_dp


def _word_type(word_bytes: int) -> Any:
    import triton.language as tl

    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word_bytes]
