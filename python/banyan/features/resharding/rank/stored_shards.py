# SPDX-License-Identifier: Apache-2.0
"""Pages that shards of other sizes have stored, as a source of this shard's: each is put together from theirs.

Invariants
  1. A page lands when all its parts have been read and verified; else it fails, as one that the store could not read.
  2. The scheduler's thread looks pages up. One thread has them read into memory of its own, some at a time, and copies
     the heads of those that are right into the arena.
  3. That memory is used again when the stores have done with it. Until then nothing is read.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from banyan._native import Feed, Read, SharedBytes, Store
from banyan.arena.page_source import Source, Wanted
from banyan.arena.prefetch import Prefetch
from banyan.features.resharding.heads import Piece
from banyan.layout import BlockGeometry
from banyan.ports import Frames, StoreFound, StoreRead
from banyan.telemetry import Counters
from banyan.telemetry.threads import start_thread
from banyan.telemetry.workers import Workers

MOST_QUEUED_S = 1.0
"""What would be queued behind more than comes in it is computed: a batch that follows its read makes decodes wait."""

_late: list[Read] = []
"""Of this process, those that had no answer in time. To let go of one is to wait for it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Pages of ``block``, whose layers are alike; a part has ``num_heads`` side by side in each of ``num_rows``."""

    block: BlockGeometry
    num_heads: int
    num_rows: int

    def parts(self, memory: SharedBytes, offset: int) -> list[npt.NDArray[np.uint8]]:
        """Of the page at that byte: of each part, ``[layer, row, head, byte]``."""
        layers, found = self.block.buffer_bytes, []
        for num_bytes in layers[0]:
            row = num_bytes // self.num_rows
            head = row // self.num_heads
            shape, strides = (len(layers), self.num_rows, self.num_heads, head), (sum(layers[0]), row, head, 1)
            found.append(np.ndarray(shape, np.uint8, memoryview(memory), offset, strides))
            offset += num_bytes
        return found


@dataclass(frozen=True, slots=True)
class Division:
    """What shards of one size, which have this one's heads together, have stored; their pages are ``shape``. ``memory``
    has room for ``num_at_once`` of each."""

    size: int
    shards: Sequence[tuple[Piece, Store]]
    shape: Shape
    memory: SharedBytes

    @property
    def num_at_once(self) -> int:
        return self.memory.num_bytes // len(self.shards) // self.shape.block.frame_bytes

    def offset(self, shard: int, place: int) -> int:
        return (shard * self.num_at_once + place) * self.shape.block.frame_bytes

    def lookup(self, keys: Sequence[str]) -> StoreFound:
        """The leading pages that all of them have, as the last one has found them."""
        for _, store in self.shards:
            found = store.lookup(list(keys))
            keys = keys[: found.num_pages]
        return found

    def read(self, keys: Sequence[str]) -> tuple[int, list[Read]]:
        """Begin to read the leading pages that all of them have; how many these are."""
        found = [store.lookup(list(keys)) for _, store in self.shards]
        num_pages, num_layers = min(one.num_pages for one in found), len(self.shape.block.buffer_bytes)
        reads = []
        for shard, (_, store) in enumerate(self.shards if num_pages else ()):
            offsets = array("q", [self.offset(shard, place) for place in range(num_pages)])
            reads.append(store.read(found[shard], num_pages, self.memory, offsets, layers_per_step=num_layers))
        return num_pages, reads

    def put_together(self, place: int, page: Sequence[npt.NDArray[np.uint8]]) -> None:
        for shard, (piece, _) in enumerate(self.shards):
            for part, theirs in zip(page, self.shape.parts(self.memory, self.offset(shard, place)), strict=True):
                part[:, :, piece.here] = theirs[:, :, piece.there]


class StoredShards(Source):
    """One rank's, whose pages are ``shape``."""

    def __init__(self, divisions: Sequence[Division], *, shape: Shape, prefetch: Prefetch, counters: Counters) -> None:
        self._divisions = divisions
        self._shape = shape
        self._prefetch = prefetch
        self._counters = counters
        self._workers = Workers(1, name="banyan-reshard", feature="a read of what another --tp has stored")
        self._queued: list[tuple[StoreRead, int]] = []
        self._num_forgotten = 0

    def ask(self, wanted: Wanted) -> int:
        nearer = wanted.keys[wanted.num_here : wanted.num_held]
        if self._prefetch.num_arriving(nearer) < len(nearer):
            # Behind a page that the own store has, and of which no read began, others would serve nobody.
            return wanted.num_held
        if self._has_enough_queued():
            return wanted.num_held
        looked_up = ((division.lookup(wanted.missing), division) for division in self._divisions)
        found, division = max(looked_up, key=lambda one: one[0].num_pages)
        start = partial(self._start, division, wanted.missing[: found.num_pages])
        self._prefetch.start_reads(wanted.missing, wanted.worth, found, wanted.behind, start)
        return wanted.num_held + found.num_pages

    def start_read(self, wanted: Wanted) -> None:
        self.ask(wanted)

    def _has_enough_queued(self) -> bool:
        """As fast as pages have come so far; until the first have, one read at a time."""
        self._queued = [(read, num_pages) for read, num_pages in self._queued if not read.has_ended]
        num_queued = sum(num_pages for _, num_pages in self._queued)
        counters = self._counters
        return num_queued * max(1, counters.resharded_us) > MOST_QUEUED_S * 1e6 * counters.resharded_pages

    def _start(
        self, division: Division, keys: Sequence[str], found: StoreFound, num_pages: int, memory: Any, offsets: Frames
    ) -> StoreRead:
        """``found``: of ``keys`` the last so many."""
        keys = keys[len(keys) - found.num_pages :][:num_pages]
        feed = Feed(memory, offsets, self._shape.block.block_bytes, len(self._shape.block.layer_bytes))
        read = cast(StoreRead, feed.read())
        try:
            self._workers.submit(partial(self._carry, feed, division, keys, memory, offsets, self._num_forgotten))
        except RuntimeError:
            # There is no thread to be had: the pages are computed.
            feed.end()
        self._queued.append((read, num_pages))
        return read

    def forget(self) -> None:
        self._num_forgotten += 1

    def close(self) -> None:
        self._workers.close(0.0)
        try:
            # A store waits for its drive as it ends.
            start_thread(self._close_stores, name="banyan-reshard-end", feature="the end of reads of another --tp")
        except RuntimeError:
            self._close_stores()

    def _close_stores(self) -> None:
        for division in self._divisions:
            for _, store in division.shards:
                store.close()

    def _carry(
        self,
        feed: Feed,
        division: Division,
        keys: Sequence[str],
        memory: SharedBytes,
        offsets: Sequence[int],
        num_forgotten: int,
    ) -> None:
        """On the thread."""
        began_s, failed = time.monotonic(), set(range(len(keys)))
        try:
            for first in range(0, len(keys), division.num_at_once):
                _late[:] = [read for read in _late if not read.has_ended]
                if _late or not feed.is_wanted or num_forgotten != self._num_forgotten:
                    return
                num_pages, reads = division.read(keys[first : first + division.num_at_once])
                lost = {place for read in reads for place in read.failed_pages()}
                _late.extend(read for read in reads if read.is_late)
                self._counters.resharded_bytes += sum(read.bytes_read for read in reads)
                for place in set(range(num_pages)) - lost:
                    division.put_together(place, self._shape.parts(memory, offsets[first + place]))
                    failed.discard(first + place)
            for layer_bytes in self._shape.block.layer_bytes:
                feed.land((len(keys) - len(failed)) * layer_bytes, list(failed))
            self._counters.resharded_pages += len(keys) - len(failed)
        finally:
            self._counters.resharded_us += round((time.monotonic() - began_s) * 1e6)
            feed.end()
