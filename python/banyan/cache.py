# SPDX-License-Identifier: Apache-2.0
"""The data path of one rank, top to bottom: match, lease, move, publish, release.

Invariants
  1. A page is promised by ``lookup`` and delivered by ``admit``: all promised pages or none. ``admit`` is the last
     moment to say no, and no means that SGLang computes the tail.
  2. From a granted lease until ``finish`` the owners of the source frames do not reuse them.
  3. Frames enter ``publish`` only when their content is complete, and leave through ``retire`` before reuse.
  4. After ``reset`` nothing that was looked up, queued or published before it is used again.

A request's fetch: looked up -> queued (``admit``) -> moving (``start``) -> landed or failed (``finish``) -> ended
(``settle``): what it followed from the store is let go. ``cancel`` takes a queued one back. All calls come from the
scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from banyan.arena.prefetch import Arrival, Prefetch
from banyan.ports import Copy, Frames, Lease, Match, OwnShelf, Source
from banyan.telemetry import Counters

NOTHING_QUEUED = -1
"""The index that SGLang expects from ``start`` when the batch fetches nothing."""

MAX_REMEMBERED = 4096
"""Lookups remembered at once: more than SGLang keeps waiting, small enough to forget aborted requests."""


FRAME_BYTES = 8
"""Frames that come back from the shelf are bytes of int64."""


STORE = -1
"""In the runs of an offer: the pages that come from the store. The others are named by roster slot."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the leading pages of a request's tail can come from: ``(slot or STORE, num_pages)`` from the front."""

    runs: tuple[tuple[int, int], ...]

    @property
    def num_pages(self) -> int:
        return sum(num_pages for _, num_pages in self.runs)


def _store_run(num_pages: int) -> tuple[tuple[int, int], ...]:
    return ((STORE, num_pages),) if num_pages else ()


def _all_of_them(rid: str, num_missing: int, num_stored: int) -> int:
    return num_stored


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lookup and what it depended on."""

    version: tuple[int, int]
    first_key: str
    num_keys: int
    match: Match
    offer: Offer


@dataclass(frozen=True, slots=True)
class _Queued:
    """One request's pages: leased ones first, then what is on its way from the store."""

    lease: Lease | None
    frames: Frames
    arrivals: Sequence[Arrival]


@dataclass(frozen=True, slots=True)
class _Batch:
    copy: Copy
    arrivals: Sequence[Arrival]


class PrefixCache:
    """One rank's view of the node's prefix cache.

    Args:
        slots: the shelves to ask, the preferred first; without it every other rank's pool.
        prefetch: brings pages up from the store; None without one.
        worth: how many pages of a request to read, given its id, how many pages of its prompt are missing and how many
            of these, from the first on, the store has.
    """

    def __init__(
        self,
        *,
        shelf: OwnShelf,
        source: Source,
        counters: Counters,
        min_fetch_pages: int,
        slots: Sequence[int] | None = None,
        prefetch: Prefetch | None = None,
        worth: Callable[[str, int, int], int] = _all_of_them,
    ) -> None:
        self._shelf = shelf
        self._source = source
        self._counters = counters
        self._min_fetch_pages = min_fetch_pages
        self._slots = slots
        self._prefetch = prefetch
        self._worth = worth
        self._seen: dict[str, _Seen] = {}
        self._queued: dict[str, _Queued] = {}
        self._moving: dict[int, _Batch] = {}
        self._ending: list[_Batch] = []
        self._num_started = 0

    # ---- match -------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: Sequence[str]) -> Offer | None:
        """Where the leading pages of ``keys`` can come from; None when it is not worth a fetch.

        SGLang asks again on every scheduling pass while a request waits, so an answer is kept until some peer's
        pages change or something comes up from the store.
        """
        version = (self._source.version(), self._prefetch.version if self._prefetch is not None else 0)
        seen = self._seen.get(rid)
        if seen is None or (seen.version, seen.num_keys, seen.first_key) != (version, len(keys), keys[0]):
            match = self._source.lookup(keys, self._slots)
            seen = _Seen(version, keys[0], len(keys), match, self._offer(rid, match, keys[match.num_pages :]))
            self._remember(rid, seen)
            self._counters.lookups += 1
            self._counters.lookup_hits += seen.offer.num_pages > 0
        return seen.offer if seen.offer.num_pages >= self._min_fetch_pages else None

    def _offer(self, rid: str, match: Match, rest: Sequence[str]) -> Offer:
        """The match, and behind it what comes from the store: it is asked for now, unless it was when the request
        came."""
        num_arriving = 0
        if self._prefetch is not None and rest:
            self._prefetch.want(rest, partial(self._worth, rid))
            num_arriving = self._prefetch.num_arriving(rest)
        return Offer((*match.runs, *_store_run(num_arriving)))

    def _remember(self, rid: str, seen: _Seen) -> None:
        self._seen.pop(rid, None)
        if len(self._seen) >= MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[rid] = seen

    # ---- lease -------------------------------------------------------------------------------------------------

    def admit(self, rid: str, keys: Sequence[str], frames: Frames) -> Offer | None:
        """Lease exactly the pages of ``keys`` and queue their copy into ``frames``; None: compute instead.

        ``keys`` is a prefix of what ``lookup`` saw: the ranks of a tensor-parallel group agree on the shortest.
        """
        seen = self._seen.pop(rid, None)
        match = seen.match if seen is not None else self._source.lookup(keys, self._slots)
        num_leased = min(match.num_pages, len(keys))
        arrivals = self._follow(keys[num_leased:], frames[num_leased:])
        lease = self._source.lease(match, num_leased) if num_leased and arrivals is not None else None
        if arrivals is None or (num_leased and lease is None):
            self._leave(arrivals or ())
            self._counters.fetches_refused += 1
            return None
        self._counters.fetches += 1
        self._queued[rid] = _Queued(lease, frames[:num_leased], arrivals)
        return Offer((*(lease.runs if lease is not None else ()), *_store_run(len(keys) - num_leased)))

    def _follow(self, keys: Sequence[str], frames: Frames) -> Sequence[Arrival] | None:
        """What comes from the store, nothing for no keys, or None when it is not coming."""
        if not keys:
            return ()
        return None if self._prefetch is None else self._prefetch.follow(keys, frames)

    def _leave(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            assert self._prefetch is not None
            self._prefetch.leave(arrival)

    def cancel(self, rid: str) -> bool:
        """Give a queued fetch back; False when it is not queued (any more)."""
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        if queued.lease is not None:
            queued.lease.release()
        self._leave(queued.arrivals)
        return True

    # ---- move --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Start the copies of every queued fetch as one batch; its index, or ``NOTHING_QUEUED``."""
        if not self._queued:
            return NOTHING_QUEUED
        batch = self._queued.values()
        loads = [(queued.lease, queued.frames) for queued in batch if queued.lease is not None]
        arrivals = [arrival for queued in batch for arrival in queued.arrivals]
        self._counters.fetched_pages += sum(lease.num_pages for lease, _ in loads)
        self._queued.clear()
        self._num_started += 1
        copy = self._source.start_copy(loads, [(item.read, item.positions, item.frames) for item in arrivals])
        self._moving[self._num_started] = _Batch(copy, arrivals)
        return self._num_started

    def moving(self, index: int) -> Copy | None:
        """The copy of batch ``index`` while it has not been finished."""
        batch = self._moving.get(index)
        return None if batch is None else batch.copy

    def finish(self, index: int) -> bool:
        """Wait until batch ``index`` stops writing; True when every layer landed and is good, or it is unknown."""
        batch = self._moving.pop(index, None)
        if batch is None:
            return True
        copy = batch.copy
        # Every arrival is looked at: a page that failed its checksum may have been copied as if it were good.
        landed = copy.finish() & all([self._prefetch.is_good(item) for item in batch.arrivals if self._prefetch])
        self._ending.append(batch)
        self.settle()
        counters = self._counters
        counters.fetches_failed += not landed
        counters.fetched_bytes += copy.bytes_fetched
        counters.copied_bytes += copy.bytes_copied
        counters.wait_us += round(copy.wait_s * 1e6)
        return landed

    def settle(self) -> None:
        """Let go what finished copies had followed, as soon as they do not read it any more. Never waits."""
        going_on = []
        for batch in self._ending:
            if batch.copy.has_ended:
                self._leave(batch.arrivals)
                self._counters.copy_us += round(batch.copy.copy_s * 1e6)
            else:
                going_on.append(batch)
        self._ending = going_on

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
        """Give back what is queued, finish the copies in flight, and forget every lookup."""
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

    def move_to(self, join: Callable[[], tuple[OwnShelf, Source, Prefetch | None]]) -> None:
        """Go on with the shelf and the peers of a new namespace, made by ``join``. Call ``quiesce`` before.

        The old ones are let go first: a rank has one shelf and one reader bit.
        """
        assert not self._queued and not self._moving and not self._ending
        del self._shelf, self._source, self._prefetch
        self._shelf, self._source, self._prefetch = join()
