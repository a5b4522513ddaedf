# SPDX-License-Identifier: Apache-2.0
"""Keeps the index file of a part of the arena that is to outlive its server: also one that is killed.

Invariants
  1. A frame is held while its page's checksum is computed, so that nobody fills it meanwhile.
  2. A checksum that cannot be computed ends the persistence, not the rank: nothing more is entered.
  3. No more than ``max_pages`` wait for theirs; what comes on top is not kept. Nothing waits.

A page: resident --filled--> being summed -> entered in the index file, or not kept. One thread calls; sums are computed
on others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import pairwise

from banyan.arena.index_file import Entry, IndexFile
from banyan.arena.residency import Residency
from banyan.telemetry import Counters, notice

Checksums = Callable[[Sequence[int], Sequence[str]], list[int]]
"""From frames and the keys of the pages in them; any thread."""

VERIFIED_AT_ONCE = 64
"""Pages that one thread verifies before it takes the next ones."""


@dataclass(frozen=True, slots=True)
class _Summing:
    frames: list[int]
    keys: list[str]
    checksums: Future[list[int]]


class Persistence:
    """Watches a residency, and writes down what it holds. Owns ``executor``."""

    def __init__(
        self,
        *,
        index_file: IndexFile,
        residency: Residency,
        checksums: Checksums,
        executor: Executor,
        max_pages: int,
        counters: Counters,
    ) -> None:
        self._index_file = index_file
        self._residency = residency
        self._checksums = checksums
        self._executor = executor
        self._max_pages = max_pages
        self._counters = counters
        self._summing: deque[_Summing] = deque()
        self._num_summing = 0

    def taken(self, frames: Sequence[int]) -> None:
        self._index_file.strike(frames)

    def filled(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        # The end of the prefix first: the order of entering is the order in which a successor lets them go.
        room = max(0, self._max_pages - self._num_summing)
        kept_frames, kept_keys = list(frames[:room])[::-1], list(keys[:room])[::-1]
        self._counters.unkept_pages += len(frames) - len(kept_frames)
        if kept_frames:
            future = self._executor.submit(self._checksums, kept_frames, kept_keys)
            self._residency.hold(kept_frames)
            self._num_summing += len(kept_frames)
            self._summing.append(_Summing(kept_frames, kept_keys, future))

    def evicted(self, keys: Sequence[str]) -> None:
        """What a frame holds until it is taken may be found again."""

    def emptied(self) -> None:
        self._index_file.strike_all()

    def poll(self) -> None:
        """Enter the pages whose checksums have been computed since the last call. Never blocks."""
        while self._summing and self._summing[0].checksums.done():
            self._enter(self._summing.popleft())

    def quiesce(self) -> None:
        """Wait for the checksums under way."""
        while self._summing:
            self._enter(self._summing.popleft())

    def close(self) -> None:
        """Enter what is under way, and end the threads."""
        self.quiesce()
        self._executor.shutdown()

    def _enter(self, summed: _Summing) -> None:
        error = summed.checksums.exception()
        self._num_summing -= len(summed.frames)
        self._residency.unhold(summed.frames)
        if error is not None:
            self._are_not_kept(summed.frames, error)
            return
        checksums = summed.checksums.result()
        self._index_file.enter(summed.frames, summed.keys, checksums)
        self._counters.kept_pages += len(summed.frames)

    def _are_not_kept(self, frames: Sequence[int], error: BaseException) -> None:
        """They stay out of the index file: a restart does not find them."""
        self._counters.unkept_pages += len(frames)
        notice(error, name="banyan-keep", feature="keeping some pages over a restart")


def verified(entries: Sequence[Entry], checksums: Checksums, executor: Executor) -> list[Entry]:
    """Those of the entries whose pages are what they were when they were entered."""
    pieces = [entries[at : at + VERIFIED_AT_ONCE] for at in range(0, len(entries), VERIFIED_AT_ONCE)]

    def sums(piece: Sequence[Entry]) -> list[int]:
        return checksums([entry.frame for entry in piece], [entry.key for entry in piece])

    return [
        entry
        for piece, seen in zip(pieces, executor.map(sums, pieces), strict=True)
        for entry, checksum in zip(piece, seen, strict=True)
        if entry.checksum == checksum
    ]


def latest(entries: Sequence[Entry]) -> list[Entry]:
    """One entry for each key: a page that was evicted and came back may have two."""
    by_key = {entry.key: entry for entry in entries}
    return [entry for entry in entries if by_key[entry.key] is entry]


def gaps(frames: Collection[int], num_frames: int) -> list[range]:
    """The runs of frames that are not among ``frames``."""
    borders = [-1, *sorted(frames), num_frames]
    runs = [range(left + 1, right) for left, right in pairwise(borders)]
    return [run for run in runs if run]
