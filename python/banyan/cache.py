# SPDX-License-Identifier: Apache-2.0
"""The data path of one rank, top to bottom: match, lease, move, publish, release.

Invariants
  1. A page is promised by ``lookup`` and delivered by ``admit``: all promised pages or none. ``admit`` is the last
     moment to say no, and no means that SGLang computes the tail.
  2. From a granted lease until ``finish`` the owners of the source frames do not reuse them.
  3. Frames enter ``publish`` only when their content is complete, and leave through ``retire`` before reuse.
  4. After ``reset`` nothing that was looked up, queued or published before it is used again.

A request's fetch: looked up -> queued (``admit``) -> moving (``start``) -> landed or failed (``finish``); ``cancel``
takes a queued one back. All calls come from the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.ports import Copy, Frames, Lease, Match, OwnShelf, Source
from banyan.telemetry import Counters

NOTHING_QUEUED = -1
"""The index that SGLang expects from ``start`` when the batch fetches nothing."""

MAX_REMEMBERED = 4096
"""Lookups remembered at once: more than SGLang keeps waiting, small enough to forget aborted requests."""


FRAME_BYTES = 8
"""Frames that come back from the shelf are bytes of int64."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lookup and what it depended on."""

    version: int
    first_key: str
    num_keys: int
    match: Match


@dataclass(frozen=True, slots=True)
class _Queued:
    lease: Lease
    frames: Frames


class PrefixCache:
    """One rank's view of the node's prefix cache."""

    def __init__(self, *, shelf: OwnShelf, source: Source, counters: Counters, min_fetch_pages: int) -> None:
        self._shelf = shelf
        self._source = source
        self._counters = counters
        self._min_fetch_pages = min_fetch_pages
        self._seen: dict[str, _Seen] = {}
        self._queued: dict[str, _Queued] = {}
        self._moving: dict[int, Copy] = {}
        self._num_started = 0

    # ---- match -------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[str]) -> Match | None:
        """Where the leading pages of ``keys`` can be fetched from; None when it is not worth a fetch.

        SGLang asks again on every scheduling pass while a request waits, so an answer is kept until some peer's
        pages change.
        """
        version = self._source.version()
        seen = self._seen.get(rid)
        if seen is None or (seen.version, seen.num_keys, seen.first_key) != (version, len(keys), keys[0]):
            seen = _Seen(version, keys[0], len(keys), self._source.lookup(keys))
            self._remember(rid, seen)
            self._counters.lookups += 1
            self._counters.lookup_hits += seen.match.num_pages > 0
        return seen.match if seen.match.num_pages >= self._min_fetch_pages else None

    def _remember(self, rid: str, seen: _Seen) -> None:
        self._seen.pop(rid, None)
        if len(self._seen) >= MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[rid] = seen

    # ---- lease -------------------------------------------------------------------------------------------------

    def admit(self, rid: str, keys: Sequence[str], frames: Frames) -> bool:
        """Lease exactly the pages of ``keys`` and queue their copy into ``frames``; False: compute instead.

        ``keys`` is a prefix of what ``lookup`` saw: the ranks of a tensor-parallel group agree on the shortest.
        """
        seen = self._seen.pop(rid, None)
        match = seen.match if seen is not None else self._source.lookup(keys)
        lease = self._source.lease(match, len(keys)) if match.num_pages >= len(keys) else None
        if lease is None:
            self._counters.fetches_refused += 1
            return False
        self._counters.fetches += 1
        self._queued[rid] = _Queued(lease, frames)
        return True

    def cancel(self, rid: str) -> bool:
        """Give a queued fetch back; False when it is not queued (any more)."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        queued.lease.release()
        return True

    # ---- move --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Start the copies of every queued fetch as one batch; its index, or ``NOTHING_QUEUED``."""
        if not self._queued:
            return NOTHING_QUEUED
        loads = [(queued.lease, queued.frames) for queued in self._queued.values()]
        self._counters.fetched_pages += sum(lease.num_pages for lease, _ in loads)
        self._queued.clear()
        self._num_started += 1
        self._moving[self._num_started] = self._source.start_copy(loads)
        return self._num_started

    def moving(self, index: int) -> Copy | None:
        """The copy of batch ``index`` while it has not been finished."""
        return self._moving.get(index)

    def finish(self, index: int) -> bool:
        """Wait until batch ``index`` stops writing; True when every layer landed. Unknown batches have landed."""
        copy = self._moving.pop(index, None)
        if copy is None:
            return True
        landed = copy.finish()
        counters = self._counters
        counters.fetches_failed += not landed
        counters.fetched_bytes += copy.bytes_fetched
        counters.copied_bytes += copy.bytes_copied
        counters.copy_us += round(copy.copy_s * 1e6)
        counters.wait_us += round(copy.wait_s * 1e6)
        return landed

    # ---- publish and release -----------------------------------------------------------------------------------

    def publish(self, frames: Frames, keys: Sequence[str]) -> None:
        """Offer complete pages of this rank's tree to the peers."""
        self._counters.published_pages += self._shelf.publish(frames, keys)

    def retire(self, frames: Frames) -> bytes:
        """Take back frames that SGLang frees; those that may be reused at once. The others come out of ``drain``."""
        reusable = self._shelf.retire(frames)
        num_pages, num_reusable = len(frames), len(reusable) // FRAME_BYTES
        self._counters.retired_pages += num_pages
        self._counters.quarantined_pages += num_pages - num_reusable
        return reusable

    def drain(self) -> bytes:
        """Frames whose readers have gone."""
        return self._shelf.drain()

    @property
    def num_quarantined(self) -> int:
        return self._shelf.num_quarantined

    def quiesce(self) -> None:
        """Give back what is queued, wait for copies in flight, and forget every lookup."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._moving):
            self.finish(index)
        self._seen.clear()

    def reset(self) -> None:
        """Forget everything and withdraw every page: all of them are about to be freed."""
        self.quiesce()
        self._shelf.reset()
        self._counters.resets += 1

    def move_to(self, join: Callable[[], tuple[OwnShelf, Source]]) -> None:
        """Go on with the shelf and the peers of a new namespace, made by ``join``. Call ``quiesce`` before.

        The old ones are let go first: a rank has one shelf and one reader bit.
        """
        assert not self._queued and not self._moving
        del self._shelf, self._source
        self._shelf, self._source = join()
