# SPDX-License-Identifier: Apache-2.0
"""The data path of one rank, top to bottom: match, lease, move, publish, release.

Invariants
  1. A page is promised by ``prepare`` and delivered by ``admit``: all promised pages or none, on all shards of the
     rank. ``admit`` is the last moment to say no, and no means that SGLang computes the tail.
  2. From a granted lease until ``finish`` the owners of the source frames do not reuse them.
  3. Frames enter ``publish`` only when their content is complete, and leave through ``retire`` before reuse.
  4. After ``reset`` nothing that was looked up, queued or published before it is used again.
  5. This is the only book of a fetch. The planner is told of every step, and keeps none.

A request's fetch: prepared -> queued (``admit``) -> moving (``start``) -> landed or failed (``finish``) -> ended
(``poll``): it is detached from the reads of the store. ``cancel`` takes a queued one back. All calls come from the
scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from banyan.arena.prefetch import Arrival, Prefetch, joined
from banyan.core import Fetch, Offer, Outcome, Run, SourceKind
from banyan.layout import Seats
from banyan.planner import FetchPlanner, RequestFacts
from banyan.ports import Copy, Frames, Lease, Match, OwnShelf, Peers
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

    version: tuple[int, int, bool]
    first_key: str
    num_keys: int
    match: Match
    offer: Offer


@dataclass(frozen=True, slots=True)
class _Held:
    """What a fetch copies from, and where to: leased pages first, then what is on its way from the store."""

    lease: Lease | None
    arrivals: Sequence[Arrival]
    frames: Frames


@dataclass(slots=True)
class _Batch:
    """Fetches that move together."""

    fetches: list[Fetch]
    arrivals: list[Arrival]
    copy: Copy
    has_landed: bool = False


class PrefixCache:
    """One rank's view of the node's prefix cache.

    Args:
        slots: the roster slots to ask, the preferred first.
        prefetch: brings pages up from the store; None without one.
        is_sent_for: whether another node is reading for a request of this id, which reads nothing itself then.
        agreed: whether all shards of the rank were granted a fetch, given whether this one was.
    """

    def __init__(
        self,
        *,
        seats: Seats,
        page_tokens: int,
        shelf: OwnShelf,
        peers: Peers,
        slots: Sequence[int],
        prefetch: Prefetch | None,
        planner: FetchPlanner,
        agreed: Callable[[bool], bool],
        counters: Counters,
        is_sent_for: Callable[[str], bool] = lambda rid: False,
    ) -> None:
        self._seats = seats
        self._page_tokens = page_tokens
        self._shelf = shelf
        self._peers = peers
        self._slots = slots
        self._prefetch = prefetch
        self._planner = planner
        self._agreed = agreed
        self._counters = counters
        self._is_sent_for = is_sent_for
        self._seen: dict[str, _Seen] = {}
        self._queued: dict[str, tuple[Fetch, _Held]] = {}
        self._moving: dict[int, _Batch] = {}
        self._ending: list[_Batch] = []
        self._num_started = 0

    # ---- match -------------------------------------------------------------------------------------------------

    def prepare(self, request: RequestFacts, keys: Sequence[str]) -> Offer:
        """Where the leading pages of ``keys`` can come from, reads of the store included, which this starts.

        SGLang asks again on every scheduling pass while a request waits, so an answer is kept until some peer's
        pages change or something comes up from the store.
        """
        num_changes = self._prefetch.version if self._prefetch is not None else 0
        version = (self._peers.version(), num_changes, self._is_sent_for(request.rid))
        seen = self._seen.get(request.rid)
        if seen is None or (seen.version, seen.num_keys, seen.first_key) != (version, len(keys), keys[0]):
            match = self._peers.lookup(keys, self._slots_for(request.max_rank))
            arriving = self._start_reads(request, keys[match.num_pages :])
            seen = _Seen(version, keys[0], len(keys), match, self._offer(match, arriving))
            self._remember(request.rid, seen)
            self._counters.lookups += 1
            self._counters.lookup_hits += seen.offer.num_pages > 0
        return seen.offer

    def _slots_for(self, rank: int) -> Sequence[int]:
        """The slots to ask, first the pool of the rank that is said to hold the most: of equally long runs the first
        supplies."""
        first = self._seats.seat(rank, self._seats.shard) if rank >= 0 else None
        return self._slots if first not in self._slots else sorted(self._slots, key=lambda slot: slot != first)

    def _start_reads(self, request: RequestFacts, keys: Sequence[str]) -> Sequence[Run]:
        """Read what only the store has, unless that began when the request came; what is on its way."""
        if self._prefetch is None or not keys:
            return ()
        if not self._is_sent_for(request.rid):
            self._prefetch.start_reads(keys, partial(self._planner.num_to_read, request))
        return self._prefetch.arriving(keys)

    def _offer(self, match: Match, arriving: Sequence[Run]) -> Offer:
        lengths = [(length, self._seats.rank_of(slot)) for slot, length in match.runs]
        num_arriving = sum(run.num_pages for run in arriving)
        _, rank = max([*lengths, (num_arriving, self._seats.dp_rank)], key=itemgetter(0))
        return Offer(self._runs(match, arriving), rank)

    def _runs(self, found: Match | Lease | None, arriving: Sequence[Run]) -> tuple[Run, ...]:
        leased = [] if found is None else [Run(self._seats.kind_of(slot), length) for slot, length in found.runs]
        return (*leased, *arriving)

    def _remember(self, rid: str, seen: _Seen) -> None:
        self._seen.pop(rid, None)
        if len(self._seen) >= MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[rid] = seen

    # ---- lease -------------------------------------------------------------------------------------------------

    def admit(self, rid: str, keys: Sequence[str], frames: Frames) -> Fetch | None:
        """Lease exactly the pages of ``keys`` and queue their copy into ``frames``; None: compute instead.

        ``keys`` is a prefix of what ``prepare`` saw: the shards of a rank agree on the shortest.
        """
        seen = self._seen.pop(rid, None)
        match = seen.match if seen is not None else self._peers.lookup(keys, self._slots)
        held = self._hold(match, keys, frames)
        # Asked of every shard, also of one that was refused: the others wait for its answer.
        is_granted = self._agreed(held is not None)
        if held is None or not is_granted:
            if held is not None:
                self._let_go(held)
            self._counters.fetches_refused += 1
            self._planner.became(rid, Outcome.REFUSED)
            return None
        arriving = joined([arrival.run for arrival in held.arrivals])
        fetch = Fetch(rid, self._runs(held.lease, arriving), self._page_tokens)
        self._queued[rid] = (fetch, held)
        self._counters.fetches += 1
        self._planner.became(rid, Outcome.LEASED)
        return fetch

    def _hold(self, match: Match, keys: Sequence[str], frames: Frames) -> _Held | None:
        """All pages of ``keys``: leases on what was matched, and behind them what comes from the store."""
        num_leased = min(match.num_pages, len(keys))
        arrivals = self._attach(keys[num_leased:], frames[num_leased:])
        if arrivals is None:
            return None
        lease = self._peers.lease(match, num_leased) if num_leased else None
        if num_leased and lease is None:
            self._detach(arrivals)
            return None
        return _Held(lease, arrivals, frames[:num_leased])

    def _attach(self, keys: Sequence[str], frames: Frames) -> Sequence[Arrival] | None:
        """What comes from the store, nothing for no keys, or None when it is not coming."""
        if not keys:
            return ()
        return None if self._prefetch is None else self._prefetch.attach(keys, frames)

    def _let_go(self, held: _Held) -> None:
        if held.lease is not None:
            held.lease.release()
        self._detach(held.arrivals)

    def _detach(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            assert self._prefetch is not None
            self._prefetch.detach(arrival)

    def cancel(self, rid: str) -> bool:
        """Give a queued fetch back; False when it is not queued (any more)."""
        _, held = self._queued.pop(rid, (None, None))
        if held is None:
            return False
        self._let_go(held)
        self._planner.became(rid, Outcome.CANCELLED)
        return True

    # ---- move --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Start the copies of every queued fetch as one batch; its index, or ``NOTHING_QUEUED``."""
        queued = list(self._queued.values())
        self._queued.clear()
        fetches = [fetch for fetch, _ in queued]
        self._planner.started(fetches)
        if not fetches:
            return NOTHING_QUEUED
        loads = [(held.lease, held.frames) for _, held in queued if held.lease is not None]
        arrivals = [arrival for _, held in queued for arrival in held.arrivals]
        self._counters.fetched_pages += sum(lease.num_pages for lease, _ in loads)
        self._num_started += 1
        copy = self._peers.start_copy(loads, [(item.read, item.positions, item.frames) for item in arrivals])
        self._moving[self._num_started] = _Batch(fetches, arrivals, copy)
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
        batch.has_landed = copy.finish() & all(
            [self._prefetch.is_good(item) for item in batch.arrivals if self._prefetch]
        )
        for fetch in batch.fetches:
            self._planner.became(fetch.rid, Outcome.LANDED if batch.has_landed else Outcome.FAILED)
        self._ending.append(batch)
        self.poll()
        counters = self._counters
        counters.fetches_failed += not batch.has_landed
        counters.fetched_bytes += copy.bytes_fetched
        counters.copied_bytes += copy.bytes_copied
        counters.wait_us += round(copy.wait_s * 1e6)
        return batch.has_landed

    def poll(self) -> None:
        """Detach copies that have ended from the reads of the store, and tell how long they took. Never waits."""
        going_on = []
        for batch in self._ending:
            if not batch.copy.has_ended:
                going_on.append(batch)
                continue
            self._detach(batch.arrivals)
            self._counters.copy_us += round(batch.copy.copy_s * 1e6)
            if batch.has_landed:
                self._planner.moved(batch.fetches, batch.copy.copy_s)
        self._ending = going_on

    def copy_of(self, key: str) -> SourceKind | None:
        """Where this rank could have the page from now: the first of its shelves. A hint, as every lookup."""
        runs = self._peers.lookup([key], self._slots).runs
        return self._seats.kind_of(runs[0][0]) if runs else None

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

    def move_to(self, join: Callable[[], tuple[OwnShelf, Peers, Prefetch | None]]) -> None:
        """Go on with the shelf and the peers of a new namespace, made by ``join``. Call ``quiesce`` before.

        The old ones are let go first: a rank has one shelf and one reader bit.
        """
        assert not self._queued and not self._moving and not self._ending
        del self._shelf, self._peers, self._prefetch
        self._shelf, self._peers, self._prefetch = join()
