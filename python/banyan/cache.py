# SPDX-License-Identifier: Apache-2.0
"""The data path of one rank, top to bottom: match, lease, move, publish, release.

Invariants
  1. A page is promised by ``prepare`` and delivered by ``admit``: all promised pages or none, on all shards of the
     rank. ``admit`` is the last moment to say no, and no means that SGLang computes the tail.
  2. From a granted lease until ``finish`` the owners of the source frames do not reuse them.
  3. Frames enter ``publish`` only when their content is complete, and leave through ``retire`` before reuse.
  4. After ``reset`` nothing that was looked up, queued or published before it is used again.
  5. This is the only book of a fetch. The planner is told of every step, and keeps none.
  6. A rank has full pages and, of some models, pages of a second kind beside them. A prefix is promised only at a
     length that can be restored (``banyan.restorable``), and pages of both kinds are leased, copied and given back
     together.
  7. What was granted and then cannot be copied, or waited for, has failed: ``finish`` says so, and SGLang throws away
     what was computed on it.
  8. After ``stop`` nothing is promised or published. What was granted before lands, or fails, as ever.

A request's fetch: prepared -> queued (``admit``) -> moving (``start``) -> landed or failed (``finish``) -> ended
(``poll``): it is detached from the reads of the store. ``cancel`` takes a queued one back; ``give_up`` makes those that
are queued fail, and their batch with them. All calls come from the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import msgspec

from banyan import faults
from banyan.arena.prefetch import joined
from banyan.core import Fetch, Offer, Outcome, Refusal, Run, SourceKind
from banyan.latest import Latest
from banyan.layout import MemberSlots
from banyan.planner import RequestFacts
from banyan.ports import Copy, Elsewhere, FetchPlanner, Frames, Lease, Match, OwnFrameTable, Peers
from banyan.restorable import KindPages, WindowPages
from banyan.supply import Held, Supply
from banyan.telemetry import Counters

NOTHING_QUEUED = -1
"""The index that SGLang expects from ``start`` when the batch fetches nothing."""

LOST = -2
"""The index of a batch of which nothing is known but that its fetches were granted: it has failed."""

MAX_REMEMBERED = 4096
"""Lookups remembered at once: more than SGLang keeps waiting, small enough to forget aborted requests."""

NOTHING_OFFERED = Offer((), -1)

FRAME_BYTES = 8
"""Frames that come back from the frame table are bytes of int64."""


class _Seen(msgspec.Struct, frozen=True):
    """A lookup and what it depended on."""

    version: tuple[object, ...]
    last_key: str
    num_keys: int
    match: Match
    offer: Offer


@dataclass(slots=True)
class _Queued:
    """A fetch, and what it holds of each kind, the full pages first."""

    fetch: Fetch
    held: tuple[Held, ...]
    is_given_up: bool = False


@dataclass(slots=True)
class _Batch:
    """Fetches that move together."""

    queued: Sequence[_Queued]
    copy: Copy
    has_landed: bool = False
    is_lost: bool = False
    """Whoever was to wait for a layer could not."""

    @property
    def fetches(self) -> list[Fetch]:
        return [item.fetch for item in self.queued]


def _release(pages: Iterable[Held]) -> None:
    """Give their leases back, as often as one likes."""
    for held in pages:
        if held.lease is not None:
            held.lease.release()


class FailedCopy:
    """The copy of a batch that could not be begun: it has ended, and failed."""

    bytes_fetched = bytes_copied = 0
    copy_s = wait_s = 0.0
    has_ended = True

    def wait_layer(self, layer: int) -> float:
        return 0.0

    def finish(self) -> bool:
        return False

    def ages_s(self) -> Sequence[float]:
        return ()


def _failed(queued: Iterable[_Queued]) -> Copy:
    _release(part for item in queued for part in item.held)
    return FailedCopy()


def _started(kind: KindPages, pages: Sequence[Held]) -> Copy:
    """The copy of one kind's pages. Where it cannot be begun, that of another kind goes on, under its own leases."""
    try:
        return kind.supply.start_copy(pages)
    except BaseException as error:  # noqa: BLE001 - whatever it is, SGLang has been promised these pages
        faults.note("cache.start", error)
        _release(pages)
        return FailedCopy()


class NobodyElse:
    """This rank reads all that it wants."""

    def is_sent_for(self, request: str) -> bool:
        return False

    def send_for(self, request: str) -> bool:
        return False


Wanted = tuple[Sequence[str], Frames]
"""Pages of one kind that a fetch is to bring, and the frames of the rank's pool that they go to."""


class PrefixCache:
    """One rank's view of the node's prefix cache.

    Args:
        full: its full pages.
        beside: its pages of a second kind, of a model that has such.
        agreed: whether all shards of the rank were granted a fetch, given whether this one was.
    """

    def __init__(
        self,
        *,
        member_slots: MemberSlots,
        page_tokens: int,
        full: KindPages,
        beside: Sequence[WindowPages],
        planner: FetchPlanner,
        agreed: Callable[[bool], bool],
        counters: Counters,
    ) -> None:
        self._member_slots = member_slots
        self._page_tokens = page_tokens
        self._full = full
        self._beside = tuple(beside)
        self._kinds: tuple[KindPages, ...] = (full, *beside)
        self._planner = planner
        self._agreed = agreed
        self._counters = counters
        self._elsewhere: Elsewhere = NobodyElse()
        self._seen: Latest[str, _Seen] = Latest(MAX_REMEMBERED)
        self._counted: Latest[str, tuple[int, int]] = Latest(MAX_REMEMBERED)
        """Of each request the most pages that a look has offered, and the most windowless ones."""
        self._queued: dict[str, _Queued] = {}
        self._moving: dict[int, _Batch] = {}
        self._ending: list[_Batch] = []
        self._finished_early: dict[int, bool] = {}
        self._num_started = 0
        self._is_stopped = False

    def read_elsewhere(self, elsewhere: Elsewhere) -> None:
        """From now on others may read for requests of this rank."""
        self._elsewhere = elsewhere

    # ---- match -------------------------------------------------------------------------------------------------

    def prepare(self, request: RequestFacts, keys: Sequence[str]) -> Offer:
        """Where the leading pages of ``keys`` can come from, reads of the store included, which this starts.

        SGLang asks again on every scheduling pass while a request waits, so an answer is kept until some peer's
        pages change or something comes up from the store.
        """
        if self._is_stopped:
            return NOTHING_OFFERED
        versions = (kind.supply.version for kind in self._kinds)
        version = (*versions, self._elsewhere.is_sent_for(request.id))
        seen = self._seen.get(request.id)
        if seen is None or (seen.version, seen.num_keys, seen.last_key) != (version, len(keys), keys[-1]):
            match = self._full.supply.lookup(keys, self._slots_for(request.max_rank))
            arriving = self._start_reads(request, keys[match.num_pages :], keys[: match.num_pages])
            found = self._offer(match, arriving)
            offer = found.first(self._longest(keys, found.num_pages))
            seen = _Seen(version, keys[-1], len(keys), match, offer)
            self._seen.put(request.id, seen)
            self._count_look(request.id, offer.num_pages, found.num_pages - offer.num_pages)
        return seen.offer

    def _count_look(self, request: str, num_offered: int, num_windowless: int) -> None:
        """A request that waits is looked up anew whenever something has changed: it counts once, with the most."""
        before = self._counted.get(request)
        most_offered, most_windowless = before or (0, 0)
        self._counters.lookups += before is None
        self._counters.lookup_hits += num_offered > 0 and most_offered == 0
        self._counters.windowless_pages += max(0, num_windowless - most_windowless)
        self._counted.put(request, (max(num_offered, most_offered), max(num_windowless, most_windowless)))

    def lengths(self, keys: Sequence[str], most: int) -> Iterator[int]:
        """What may be asked of ``admit``, of the first ``most`` pages of an offer: the longest first."""
        lengths: Iterable[int] = range(most, 0, -1)
        for kind in self._beside:
            lengths = kind.lengths(keys, most)
        yield from lengths

    def _longest(self, keys: Sequence[str], most: int) -> int:
        """Of up to ``most`` pages, how many can be restored."""
        for kind in self._beside:
            most = kind.longest(keys, most)
        return most

    def _slots_for(self, rank: int) -> Sequence[int]:
        """The slots to ask, first the pool of the rank that is said to hold the most: of equally long runs the first
        supplies."""
        slots = self._full.supply.slots
        is_here = rank in self._member_slots.layout.ranks_here
        first = self._member_slots.slot(rank, self._member_slots.shard) if is_here else None
        return slots if first not in slots else sorted(slots, key=lambda slot: slot != first)

    def _start_reads(self, request: RequestFacts, keys: Sequence[str], behind: Sequence[str]) -> Sequence[Run]:
        """Read what only the store has, unless that began when the request came; what is on its way. Of two kinds only
        what began then: it needs to be known which pages of the other kind go with it."""
        prefetch = self._full.supply.prefetch
        if prefetch is None or not keys:
            return ()
        if not self._beside and not self._elsewhere.send_for(request.id):
            prefetch.start_reads(keys, partial(self._planner.num_to_read, request), behind=behind)
        return self._full.supply.arriving(keys)

    def _offer(self, match: Match, arriving: Sequence[Run]) -> Offer:
        if not match.num_pages and not arriving:
            return Offer((), self._member_slots.dp_rank)
        lengths = [(length, self._member_slots.rank_of(slot)) for slot, length in match.runs]
        num_arriving = sum(run.num_pages for run in arriving)
        _, rank = max([*lengths, (num_arriving, self._member_slots.dp_rank)], key=itemgetter(0))
        return Offer(self._runs(match, arriving), rank)

    def _runs(self, found: Match | Lease | None, arriving: Sequence[Run]) -> tuple[Run, ...]:
        leased = [] if found is None else [Run(self._member_slots.kind_of(slot), length) for slot, length in found.runs]
        return tuple(joined([*leased, *arriving]))

    def forget(self, request: str) -> None:
        """It has ended: nothing that was looked up for it is used again."""
        self._seen.pop(request, None)
        self._counted.pop(request, None)

    # ---- lease -------------------------------------------------------------------------------------------------

    def admit(self, request: str, keys: Sequence[str], frames: Frames, *beside: Wanted) -> Fetch | None:
        """Lease exactly the pages of ``keys`` and queue their copy into ``frames``; None: compute instead.

        ``keys`` is a prefix of what ``prepare`` saw: the shards of a rank agree on the shortest. ``beside``: what goes
        with it of the other kind, from its end on, of a model that has such.
        """
        try:
            queued = self._hold(request, (keys, frames), beside)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other shards wait for an answer
            faults.note("cache.hold", error)
            queued = Refusal.FAULT
        return self._agreed_on(request, queued)

    def refuse(self, request: str) -> None:
        """In the place of ``admit``, where this shard cannot say which pages it wants."""
        self._agreed_on(request, Refusal.FAULT)

    def _agreed_on(self, request: str, queued: _Queued | Refusal) -> Fetch | None:
        # Asked of every shard, also of one that was refused: the others wait for its answer.
        is_granted = self._agreed(isinstance(queued, _Queued))
        if isinstance(queued, Refusal) or not is_granted:
            if isinstance(queued, _Queued):
                self._let_go(queued.held)
                queued = Refusal.SHARD
            self._counters.fetches_refused += 1
            self._planner.refused(request, queued)
            return None
        self._queued[request] = queued
        self._planner.became(request, Outcome.LEASED)
        return queued.fetch

    def _hold(self, request: str, full: Wanted, beside: Sequence[Wanted]) -> _Queued | Refusal:
        """All of them, or none."""
        if self._is_stopped:
            return Refusal.STOPPED
        if len(beside) != len(self._beside):
            return Refusal.WINDOW
        # Of two under one name one would be lost, and SGLang take its frames for filled.
        if request in self._queued:
            return Refusal.NAME
        seen = self._seen.pop(request, None)
        match = seen.match if seen is not None else self._full.supply.lookup(full[0])
        held: list[Held] = []
        for kind, wanted in zip(self._kinds, (full, *beside), strict=True):
            try:
                pages = kind.supply.hold(match if kind is self._full else kind.supply.lookup(wanted[0]), *wanted)
            except BaseException:
                self._let_go(held)
                raise
            if isinstance(pages, Refusal):
                self._let_go(held)
                return pages if kind is self._full else Refusal.WINDOW
            held.append(pages)
        arriving = [in_flight_read.run for in_flight_read in held[0].in_flight_reads]
        fetch = Fetch(request, self._runs(held[0].lease, arriving), self._page_tokens)
        return _Queued(fetch, tuple(held))

    def _let_go(self, held: Sequence[Held]) -> None:
        for kind, pages in zip(self._kinds, held, strict=False):
            kind.supply.let_go(pages)

    def cancel(self, request: str) -> bool:
        """Give a queued fetch back; False when it is not queued (any more)."""
        queued = self._queued.pop(request, None)
        if queued is None:
            return False
        self._let_go(queued.held)
        self._planner.became(request, Outcome.CANCELLED)
        return True

    def give_up(self) -> int:
        """Let go of what peers hold for fetches that are queued, which fail; how many they are.

        For whoever waits for peers before he can go on: they may be waiting for this.
        """
        leased = [item for item in self._queued.values() if any(held.lease is not None for held in item.held)]
        _release(held for item in leased for held in item.held)
        for item in leased:
            item.is_given_up = True
        return len(leased)

    # ---- move --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Start the copies of every queued fetch as one batch; its index, or ``NOTHING_QUEUED``."""
        queued = list(self._queued.values())
        self._queued.clear()
        self._planner.started([item.fetch for item in queued])
        if not queued:
            return NOTHING_QUEUED
        self._num_started += 1
        self._counters.fetches += len(queued)
        is_given_up = any(item.is_given_up for item in queued)
        copy = _failed(queued) if is_given_up else self._copy_of(queued)
        self._moving[self._num_started] = _Batch(queued, copy)
        return self._num_started

    def _copy_of(self, queued: Sequence[_Queued]) -> Copy:
        copy = _started(self._full, [item.held[0] for item in queued])
        for place, kind in enumerate(self._beside, start=1):
            copy = kind.joined(copy, _started(kind, [item.held[place] for item in queued]))
        return copy

    def moving(self, index: int) -> Copy | None:
        """The copy of batch ``index`` while it has not been finished."""
        batch = self._moving.get(index)
        return None if batch is None else batch.copy

    def finish(self, index: int) -> bool:
        """Wait until batch ``index`` stops writing; True when every layer landed and is good, or nothing was queued."""
        batch = self._moving.pop(index, None)
        if batch is None:
            return self._finished_early.pop(index, index != LOST)
        copy = batch.copy
        # First: whatever fails below, it is detached from its reads.
        self._ending.append(batch)
        if copy.finish() and not batch.is_lost:
            batch.has_landed = self._are_good(batch)
        else:
            self._look_at_ended(batch)
        if batch.has_landed:
            self._counters.fetched_pages += sum(item.held[0].num_leased for item in batch.queued)
        for fetch in batch.fetches:
            self._planner.became(fetch.request, Outcome.LANDED if batch.has_landed else Outcome.FAILED)
        self.poll()
        counters = self._counters
        counters.fetches_failed += not batch.has_landed
        counters.fetched_bytes += copy.bytes_fetched
        counters.copied_bytes += copy.bytes_copied
        counters.wait_us += round(copy.wait_s * 1e6)
        return batch.has_landed

    def lose(self, index: int) -> None:
        """Nobody could wait for batch ``index``: what is computed behind it is good for nothing."""
        batch = self._moving.get(index)
        if batch is not None:
            batch.is_lost = True

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> list[Copy]:
        """Promise and publish nothing from now on; the copies that are under way."""
        self._is_stopped = True
        self._seen.clear()
        return [batch.copy for batch in self._moving.values()]

    def _are_good(self, batch: _Batch) -> bool:
        """Whether all that came from the store has been verified."""
        return all([kind.supply.are_good(held.in_flight_reads) for kind, held in self._held_of(batch)])

    def _look_at_ended(self, batch: _Batch) -> None:
        """What is known to have failed of the reads of a batch that has failed itself: nobody waits for the others."""
        for kind, held in self._held_of(batch):
            kind.supply.look_at_ended(held.in_flight_reads)

    def _held_of(self, batch: _Batch) -> Iterator[tuple[KindPages, Held]]:
        for item in batch.queued:
            yield from zip(self._kinds, item.held, strict=True)

    def poll(self) -> None:
        """Detach copies that have ended from the reads of the store, and tell how long both took. Never waits."""
        for batch in list(self._ending):
            if not batch.copy.has_ended:
                continue
            # First: whatever fails below, none is detached twice.
            self._ending.remove(batch)
            self._detach(batch)
            self._counters.copy_us += round(batch.copy.copy_s * 1e6)
            if batch.has_landed:
                self._planner.moved(batch.fetches, batch.copy.copy_s)
        for came, read_s in self._full.supply.take_unfollowed():
            self._planner.was_read(came, read_s)

    def _detach(self, batch: _Batch) -> None:
        for kind, held in self._held_of(batch):
            kind.supply.detach(held.in_flight_reads)

    @property
    def peers(self) -> Peers:
        """Under the present namespace."""
        return self._full.supply.peers

    def copies_of(self, keys: Sequence[str]) -> list[SourceKind | None]:
        """Where this rank could have each page from now: the first of its frame tables. A hint, as every lookup."""
        kind_of = self._member_slots.kind_of
        return [None if slot is None else kind_of(slot) for slot in self._full.supply.holders(keys)]

    # ---- what prompts ask for ----------------------------------------------------------------------------------

    def log_access(self, pages: bytes) -> None:
        """Tell the other ranks that a prompt of these pages has come here; by their numbers."""
        self._full.frame_table.log_access(pages)

    def peer_accesses(self) -> Sequence[bytes]:
        """What prompts of the other ranks asked for since the last call, prompt by prompt."""
        return self.peers.read_access_logs(self._member_slots.peers)

    # ---- publish and release -----------------------------------------------------------------------------------

    def publish(self, frames: Frames, keys: Sequence[str]) -> None:
        """Offer complete pages of this rank's tree to the peers."""
        if not self._is_stopped:
            self._counters.published_pages += self._full.frame_table.publish(frames, keys)

    def retire(self, frames: Frames) -> bytes:
        """Take back frames that SGLang frees; those that may be reused at once. The others come out of ``drain``."""
        reusable = self._full.retire(frames)
        num_pages, num_reusable = len(frames), len(reusable) // FRAME_BYTES
        self._counters.retired_pages += num_pages
        self._counters.quarantined_pages += num_pages - num_reusable
        return reusable

    def drain(self) -> bytes:
        """Frames whose readers have gone."""
        return self._full.drain()

    def quiesce(self) -> None:
        """Give back what is queued, finish the copies in flight, and forget every lookup. How the copies ended is told
        when SGLang asks."""
        for request in list(self._queued):
            self.cancel(request)
        for index in list(self._moving):
            self._finished_early[index] = self.finish(index)
        self._seen.clear()

    def reset(self) -> None:
        """Forget everything and withdraw every page: all of them are about to be freed."""
        self.quiesce()
        self._finished_early.clear()
        for kind in self._kinds:
            kind.frame_table.reset()
        self._counters.resets += 1

    def move_to(self, joins: Sequence[Callable[[], tuple[OwnFrameTable, Supply]]]) -> None:
        """Go on in a new namespace: ``joins`` make the frame table and the supply of each kind. Call ``quiesce``
        before."""
        assert not self._queued and not self._moving and not self._ending
        for kind, join in zip(self._kinds, joins, strict=True):
            kind.move_to(join)
