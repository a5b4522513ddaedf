# SPDX-License-Identifier: Apache-2.0
"""The pages of one pull, as reads of a bounded size, of which a bounded number is under way. Knows no NIXL.

Invariants
  1. Nothing is read to another place than the pages' own in the memory of the rank, whatever the other node has said.
  2. A layer has landed when all its bytes and those of the layers before it have.
  3. No more than `WINDOW_BYTES`, or one read, are under way; after ``stop`` no read begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

CHUNK_BYTES = 1 << 20
"""Of one read: so often is it known that bytes still come."""

PIECE_BYTES = 64 << 10
"""Of one page in one read, by as many layers as that takes: pieces of a layer each would cost a processor half as much
again. The first layer goes alone: a forward waits for it."""

WINDOW_BYTES = 8 << 20
"""More than the fastest networks of one site have under way."""

Moves = Any
"""A row for each piece: address, bytes, device."""


class Reads(Protocol):
    """An engine's."""

    def begin(self, peer: str, to: Moves, from_: Moves, /) -> Any:
        """Start to read; a handle."""

    def is_done(self, handle: Any, /) -> bool:
        """Whether all has come; the handle is let go then. Raises when it will not."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    layers: slice
    pages: slice
    num_bytes: int


class Reading:
    """One pull."""

    def __init__(self, peer: str, base: int, offsets: bytes, places: bytes, layer_bytes: Sequence[int]) -> None:
        """``base``: where the memory lies that the offsets are of."""
        self._peer = peer
        self._to = np.frombuffer(offsets, dtype="<u8") + np.uint64(base)
        self._from = np.frombuffer(places, dtype="<u8")
        self._layer_bytes = layer_bytes
        self._chunks = self._cut()
        self._under_way: deque[tuple[_Chunk, Any]] = deque()
        self._under_way_bytes = 0
        self._next: _Chunk | None = next(self._chunks, None)
        self.num_landed = 0
        self.num_done = 0
        """Reads that are done."""

    @property
    def is_over(self) -> bool:
        return self._next is None and not self._under_way

    def stop(self) -> None:
        self._next = None

    def step(self, reads: Reads) -> None:
        """Look at what is under way, and begin one read if there is room: beginning may be all that a read takes."""
        while self._under_way and reads.is_done(self._under_way[0][1]):
            chunk, _ = self._under_way.popleft()
            self._under_way_bytes -= chunk.num_bytes
            self.num_done += 1
            if chunk.pages.stop == len(self._to):
                self.num_landed = chunk.layers.stop
        if self._next is not None and self.has_room:
            chunk, self._next = self._next, next(self._chunks, None)
            self._under_way.append((chunk, self._begin(chunk, reads)))
            self._under_way_bytes += chunk.num_bytes

    @property
    def has_room(self) -> bool:
        """Whether one more read can begin."""
        chunk = self._next
        if chunk is None:
            return False
        return not self._under_way or self._under_way_bytes + chunk.num_bytes <= WINDOW_BYTES

    def _begin(self, chunk: _Chunk, reads: Reads) -> Any:
        start, size = sum(self._layer_bytes[: chunk.layers.start]), sum(self._layer_bytes[chunk.layers])
        return reads.begin(self._peer, *(_moves(pages[chunk.pages], start, size) for pages in (self._to, self._from)))

    def _cut(self) -> Iterator[_Chunk]:
        num_pages = len(self._to)
        for layers in self._groups():
            size = sum(self._layer_bytes[layers])
            step = max(1, CHUNK_BYTES // size)
            for first in range(0, num_pages, step):
                last = min(num_pages, first + step)
                yield _Chunk(layers, slice(first, last), (last - first) * size)

    def _groups(self) -> Iterator[slice]:
        """Layers that are read together: they lie side by side."""
        start, num_bytes = 0, 0
        for layer, size in enumerate(self._layer_bytes):
            num_bytes += size
            is_last = layer == len(self._layer_bytes) - 1
            if start == 0 or is_last or num_bytes + size > PIECE_BYTES:
                yield slice(start, layer + 1)
                start, num_bytes = layer + 1, 0


def _moves(pages: Any, start: int, num_bytes: int) -> Moves:
    moves = np.zeros((len(pages), 3), dtype=np.uint64)
    moves[:, 0] = pages + np.uint64(start)
    moves[:, 1] = num_bytes
    return moves
