# SPDX-License-Identifier: Apache-2.0
"""Pages of a store of values on their way into memory: layer by layer, verified before anybody is told.

Invariants
  1. A layer of a page counts as landed only when its checksum agrees with the one in the value's header, and those are
     bound to the page's key: another page's value does not pass.
  2. Memory is written until ``carry`` returns, and not afterwards: then the read has ended, whatever happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan._native import Feed, SharedBytes
from banyan.features.stores.value_format import HeaderBuffer, ValueFormat
from banyan.features.stores.values import Iovec, Reading, Transfer, Values

LOOK_S = 0.5
"""How often a reader that waits for its pace says that it is there."""
LOAD_BYTES = 64 << 20
"""What a library is asked for at once: some leases of values last only seconds."""


@dataclass(slots=True, eq=False)
class PageRead:
    """Pages that are to be read: page ``i`` to byte ``offsets[i]`` of ``memory``, which begins at ``base``.

    Attributes:
        is_current: whether the namespace is still the one that they were found in.
        failed: page -> whether it was there; known when the read has ended.
    """

    namespace: bytes
    keys: Sequence[str]
    memory: SharedBytes
    base: int
    offsets: Sequence[int]
    layers_per_step: int
    feed: Feed
    is_current: Callable[[], bool]
    failed: dict[int, bool] = field(default_factory=dict)


class ReadPace:
    """What all reads of a store take together. ``bytes_per_s`` of None: no limit. Any thread."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._due_s = 0.0

    def due_s(self, num_bytes: int) -> float:
        """Until when whoever has read so much waits."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            self._due_s = max(self._due_s, time.monotonic()) + num_bytes / self._bytes_per_s
            return self._due_s


class PageReader:
    """One thread's means to read: its room for headers. ``moved`` is told after each answer of the library, and while
    ``pace`` has it wait."""

    def __init__(
        self,
        values: Values,
        value_format: ValueFormat,
        header_buffer: HeaderBuffer,
        *,
        pace: ReadPace,
        moved: Callable[[Feed], None],
    ) -> None:
        self._values = values
        self._value_format = value_format
        self._header_buffer = header_buffer
        self._pace = pace
        self._moved = moved

    def carry(self, read: PageRead, names: Sequence[str]) -> None:
        """Bring the pages. Blocks. The read ends when its caller says so.

        Raises:
            OSError: when the store does not answer; the pages that were missing by then have failed.
        """
        with self._values.reading(names) as reading:
            sums: list[tuple[int, ...]] = []
            for layers in self._value_format.steps(read.layers_per_step, self._values.least_bytes):
                if not (read.feed.is_wanted and read.is_current()):
                    return
                if not sums:
                    sums = self._first_step(read, reading, layers)
                else:
                    self._next_step(read, reading, layers)
                for layer in layers:
                    self._verify(read, layer, sums)
                    num_pages = len(read.keys) - len(read.failed)
                    read.feed.land(num_pages * self._value_format.layer_bytes[layer], list(read.failed))

    def _first_step(self, read: PageRead, reading: Reading, layers: range) -> list[tuple[int, ...]]:
        """The headers come with the first layers. The checksums of each page; () for one that is not there."""
        header_buffer, value_format = self._header_buffer, self._value_format
        sums: list[tuple[int, ...]] = []
        for first in range(0, len(read.keys), header_buffer.num_headers):
            pages = range(first, min(first + header_buffer.num_headers, len(read.keys)))
            transfers = [
                Transfer(
                    page,
                    0,
                    (
                        Iovec(header_buffer.place(page - first), value_format.header_bytes),
                        self._frame(read, page, layers),
                    ),
                )
                for page in pages
            ]
            for page, has_come in zip(pages, self._load(read, reading, transfers), strict=True):
                said = value_format.sums_of(header_buffer.view(page - first)) if has_come else None
                sums.append(said or ())
                if said is None:
                    read.failed[page] = has_come
        return sums

    def _next_step(self, read: PageRead, reading: Reading, layers: range) -> None:
        start = self._value_format.header_bytes + self._value_format.starts[layers.start]
        pages = [page for page in range(len(read.keys)) if page not in read.failed]
        transfers = [Transfer(page, start, (self._frame(read, page, layers),)) for page in pages]
        for page, has_come in zip(pages, self._load(read, reading, transfers), strict=True):
            if not has_come:
                read.failed[page] = False

    def _frame(self, read: PageRead, page: int, layers: range) -> Iovec:
        """Where layers of a page go."""
        start, end = self._value_format.starts[layers.start], self._value_format.starts[layers.stop]
        return Iovec(read.base + read.offsets[page] + start, end - start)

    def _verify(self, read: PageRead, layer: int, sums: Sequence[Sequence[int]]) -> None:
        pages = [page for page in range(len(read.keys)) if page not in read.failed]
        keys, offsets = [read.keys[page] for page in pages], [read.offsets[page] for page in pages]
        seen = self._value_format.layer_sums(read.memory, read.namespace, keys, offsets, layer)
        for page, checksum in zip(pages, seen, strict=True):
            if checksum != sums[page][layer]:
                read.failed[page] = True

    def _load(self, read: PageRead, reading: Reading, transfers: Sequence[Transfer]) -> list[bool]:
        num_at_once = max(1, LOAD_BYTES // transfers[0].num_bytes) if transfers else 1
        come: list[bool] = []
        for first in range(0, len(transfers), num_at_once):
            some = transfers[first : first + num_at_once]
            due_s = self._pace.due_s(sum(transfer.num_bytes for transfer in some))
            come += reading.load(some)
            self._moved(read.feed)
            while (left_s := due_s - time.monotonic()) > 0 and read.feed.is_wanted:
                # The library is not to blame.
                time.sleep(min(left_s, LOOK_S))
                self._moved(read.feed)
        return come
