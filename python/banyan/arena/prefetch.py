# SPDX-License-Identifier: Apache-2.0
"""From the store, or another node, into the arena, as soon as a request may need it; the copy into the pool follows
layer by layer.

Invariants
  1. A page is being read at most once from here, into a frame that is ``filling`` in the residency.
  2. A page is published only after all its layers have been read and verified, and after the copies attached to its
     read have ended. A page that failed is not published, and the request that used it is told.
  3. No more than ``max_pages`` are on their way; what comes on top is not read. Nothing waits.
  4. A late read counts as failed at once, but its frames stay ``filling`` until it has ended. Nobody waits for that:
     ``quiesce`` leaves it behind, and ``poll`` gives its frames back.
  5. No read takes a frame from the pages of its own prompt that come before: behind a hole they would serve nobody. Of
     a prompt that is longer than the arena the last pages are computed.

A reading: under way -> read, while copies are attached to it -> landed: its good pages resident, the other frames free
again. One thread calls; the store and the other nodes' pages come on their own.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import itemgetter

from banyan.arena.page_source import Worth
from banyan.arena.read_rate import ReadRate
from banyan.arena.residency import Residency
from banyan.core import Run, SourceKind
from banyan.ports import Frames, PageStore, Peers, StoreFound, StoreRead
from banyan.telemetry import Counters

logger = logging.getLogger("banyan")

Start = Callable[[StoreFound, int, object, Frames], StoreRead]
"""Starts to read the first so many pages of what was found into a memory, each at its byte offset."""

QUIESCE_S = 15.0
"""A store says within 10 s that it is late."""
LOOK_S = 0.002

MOST_UNFOLLOWED = 64
"""Reads that are remembered for whoever asks how long they took, which may be nobody."""

_WORDS = {SourceKind.STORE: "read", SourceKind.REMOTE: "pull"}
"""What the counters call it."""


@dataclass(slots=True, eq=False)
class _Reading:
    keys: Sequence[str]
    frames: list[int]
    read: StoreRead
    kind: SourceKind
    origin: str
    began_s: float
    num_attached: int = 0
    was_followed: bool = False
    lost: frozenset[int] | None = None
    """Positions of the pages that failed; None until somebody has asked behind the last layer."""

    def num_coming(self, positions: Sequence[int]) -> int:
        """The first of these pages that are not known to have failed."""
        lost = self.lost
        if lost is None:
            return 0 if self.read.is_late else len(positions)
        return next((place for place, position in enumerate(positions) if position in lost), len(positions))


@dataclass(frozen=True, slots=True)
class InFlightRead:
    """Pages for one request that a copy is to take over from a read: page ``positions[i]`` goes to ``frames[i]``."""

    read: StoreRead
    positions: list[int]
    frames: Frames
    _reading: _Reading = field(repr=False)

    @property
    def run(self) -> Run:
        return Run(self._reading.kind, len(self.positions), self._reading.origin)


class Prefetch:
    """Reads pages of one rank's requests.

    Args:
        peers: finds pages on this node's frame tables.
        memory: the bytes of this rank's part of the arena; frame ``f`` begins at ``f * frame_bytes``.
        max_pages: bound on the pages that are on their way.
        layers_per_read: layers in one submission; 1 streams layer by layer.
    """

    def __init__(
        self,
        *,
        store: PageStore | None,
        residency: Residency,
        peers: Peers,
        arena_slots: Sequence[int],
        memory: object,
        frame_bytes: int,
        max_pages: int,
        layers_per_read: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._residency = residency
        self._peers = peers
        self._arena_slots = list(arena_slots)
        self._memory = memory
        self._frame_bytes = frame_bytes
        self._max_pages = max_pages
        self._layers_per_read = layers_per_read
        self._counters = counters
        self._clock = clock
        self._rate = ReadRate()
        self._has_told = False
        self._readings: list[_Reading] = []
        self._left_behind: list[_Reading] = []
        self._unfollowed: deque[tuple[Run, float]] = deque(maxlen=MOST_UNFOLLOWED)
        self._place_of: dict[str, tuple[_Reading, int]] = {}
        self.version = 0
        """Changes whenever ``arriving`` could answer differently."""

    def start_reads(
        self,
        keys: Sequence[str],
        worth: Worth,
        found: StoreFound | None = None,
        behind: Sequence[str] = (),
        read: Start | None = None,
    ) -> None:
        """Start to read the leading pages of ``keys`` that the store holds and that are not on their way.

        ``keys`` go to the end of a prompt; ``worth`` says how many of the pages that were found are to be read.
        ``found``: what the store holds of ``keys``, where that was looked up before. ``behind``: the pages of the
        prompt before them, which stay where they are. ``read``: who reads what was found, where the store does not.
        """
        if self._store is None:
            return
        num_arriving = self.num_arriving(keys)
        keys = keys[num_arriving:]
        if not keys:
            return
        found = self._store.lookup(list(keys)) if found is None else found.after(num_arriving)
        self._start(keys, worth, found, read or self._read_store, SourceKind.STORE, "", behind)

    def start_pull(
        self,
        keys: Sequence[str],
        worth: Worth,
        found: StoreFound,
        pull: Start,
        origin: str,
        behind: Sequence[str] = (),
    ) -> None:
        """As ``start_reads``, for what was ``found`` of ``keys`` at the node ``origin``; ``pull`` brings it."""
        num_arriving = self.num_arriving(keys)
        self._start(keys[num_arriving:], worth, found.after(num_arriving), pull, SourceKind.REMOTE, origin, behind)

    def _read_store(self, found: StoreFound, num_pages: int, memory: object, offsets: Frames) -> StoreRead:
        assert self._store is not None
        return self._store.read(found, num_pages, memory, offsets, layers_per_step=self._layers_per_read)

    def _start(
        self,
        keys: Sequence[str],
        worth: Worth,
        found: StoreFound,
        start: Start,
        kind: SourceKind,
        origin: str,
        behind: Sequence[str],
    ) -> None:
        # A page that failed is read again only when its first read is over.
        num_idle = sum(1 for _ in takewhile(lambda key: key not in self._place_of, keys))
        num_found = min(num_idle, found.num_pages)
        num_wanted = worth(len(keys), Run(kind, num_found, origin)) if num_found else 0
        if not num_wanted:
            return
        room = min(num_wanted, self._max_pages - len(self._place_of))
        frames = self._residency.claim(max(0, room), behind, keys)
        self._counters.add(f"{_WORDS[kind]}s_dropped_pages", num_wanted - len(frames))
        self._tell_if_too_long(num_wanted)
        if not frames:
            return
        offsets = array("q", [frame * self._frame_bytes for frame in frames])
        began_s = self._clock()
        try:
            read = start(found, len(frames), self._memory, offsets)
        except BaseException:
            self._residency.abandon(frames)
            raise
        reading = _Reading(keys[: len(frames)], frames, read, kind, origin, began_s)
        self._readings.append(reading)
        self._place_of.update((key, (reading, position)) for position, key in enumerate(reading.keys))
        self._counters.add(f"{_WORDS[kind]}s", 1)
        self.version += 1

    def _tell_if_too_long(self, num_wanted: int) -> None:
        """Once: what is counted may as well be others' reads that were first."""
        if num_wanted > self._max_pages and not self._has_told:
            self._has_told = True
            logger.warning(
                "banyan: %d pages of a prompt could be read and the arena (--banyan-host-gb) lends %d at once: "
                "unless such a request waits, the rest is computed",
                num_wanted,
                self._max_pages,
            )

    @property
    def num_reading(self) -> int:
        """Pages that the store has been asked for and is not done with."""
        readings = (reading for reading in self._readings if reading.kind is SourceKind.STORE)
        return sum(len(reading.frames) for reading in readings if not reading.read.has_ended)

    @property
    def pages_per_s(self) -> int:
        """How fast they have been coming from the store; 0 where that is not known."""
        return self._rate.pages_per_s

    def num_in_arena(self, keys: Sequence[str]) -> int:
        """Leading pages of ``keys`` that lie in the node's arena now."""
        return self._peers.lookup(keys, self._arena_slots).num_pages

    @property
    def on_their_way(self) -> Container[str]:
        """Pages of all reads, also such as have failed."""
        return self._place_of

    def num_arriving(self, keys: Sequence[str]) -> int:
        """Leading pages of ``keys`` that are on their way and not known to have failed."""
        return sum(run.num_pages for run in self.arriving(keys))

    def arriving(self, keys: Sequence[str]) -> list[Run]:
        """They, and where from."""
        if not self._place_of:
            return []
        runs: list[Run] = []
        places = map(self._place_of.__getitem__, takewhile(self._place_of.__contains__, keys))
        # Each read is looked at once: its pages may be thousands, and this is asked at every scheduling pass.
        for reading, pages in groupby(places, key=itemgetter(0)):
            positions = [position for _, position in pages]
            num_coming = reading.num_coming(positions)
            if num_coming:
                runs.append(Run(reading.kind, num_coming, reading.origin))
            if num_coming < len(positions):
                break
        return joined(runs)

    def attach(self, keys: Sequence[str], frames: Frames) -> list[InFlightRead] | None:
        """What a copy of exactly ``keys`` into the pool's ``frames`` takes over; None when a page is not coming.

        Every in-flight read is given to ``detach`` in the end.
        """
        if self.num_arriving(keys) < len(keys):
            return None
        places = [self._place_of[key] for key in keys]
        in_flight_reads = []
        start = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end][0] is not places[start][0]:
                reading = places[start][0]
                reading.num_attached += 1
                reading.was_followed = True
                positions = [position for _, position in places[start:end]]
                in_flight_reads.append(InFlightRead(reading.read, positions, frames[start:end], reading))
                start = end
        return in_flight_reads

    def detach(self, in_flight_read: InFlightRead) -> None:
        """The copy of ``in_flight_read`` has ended, or will not start."""
        in_flight_read._reading.num_attached -= 1

    def is_good(self, in_flight_read: InFlightRead) -> bool:
        """Whether all its pages were verified. Waits for the last layer of the read, as its copy has."""
        reading = in_flight_read._reading
        if reading.lost is None:
            reading.lost = frozenset(reading.read.failed_pages())
            self.version += 1
        return reading.lost.isdisjoint(in_flight_read.positions)

    def poll(self) -> None:
        """Publish what has been read since the last call. Never blocks."""
        for reading in list(self._readings):
            if reading.read.has_ended and reading.num_attached == 0:
                self._land(reading)
        for reading in [late for late in self._left_behind if late.read.has_ended]:
            self._left_behind.remove(reading)
            self._residency.abandon(reading.frames)

    @property
    def num_left_behind(self) -> int:
        """Reads that were forgotten before they had ended: their frames may still be written to."""
        return len(self._left_behind)

    def _end(self, reading: _Reading) -> frozenset[int]:
        """Positions of the pages that failed."""
        lost = reading.lost = frozenset(position for position, _ in reading.read.finish())
        word = _WORDS[reading.kind]
        self._counters.add(f"{word}_failed_pages", len(lost))
        self._counters.add(f"{word}_bytes", reading.read.bytes_read)
        self._counters.add(f"{word}_us", round(reading.read.read_s * 1e6))
        if reading.kind is SourceKind.STORE:
            self._rate.ended(reading.began_s, reading.read.read_s, len(reading.frames) - len(lost))
        return lost

    def _land(self, reading: _Reading) -> None:
        lost = self._end(reading)
        self._forget(reading)
        keys, frames = reading.keys, reading.frames
        # Another rank may have read the same pages meanwhile: one copy is enough for the node.
        num_twice = self.num_in_arena(keys)
        good = [position for position in range(num_twice, len(keys)) if position not in lost]
        kept = {frames[position] for position in good}
        self._residency.abandon([frame for frame in frames if frame not in kept])
        self._residency.publish([frames[position] for position in good], [keys[position] for position in good])
        self._counters.add(f"{_WORDS[reading.kind]}_pages", len(good))
        if not reading.was_followed:
            came = Run(reading.kind, len(keys) - len(lost), reading.origin)
            self._unfollowed.append((came, reading.read.read_s))

    def take_unfollowed(self) -> Sequence[tuple[Run, float]]:
        """Reads that have landed since the last call and were copied by nobody: pages that came, in so many seconds."""
        unfollowed = list(self._unfollowed)
        self._unfollowed.clear()
        return unfollowed

    def _forget(self, reading: _Reading) -> None:
        self._readings.remove(reading)
        for key in reading.keys:
            self._place_of.pop(key, None)
        self.version += 1

    def quiesce(self) -> None:
        """Wait for the reads under way, until they are late, and forget what they brought. No copy may be attached."""
        deadline_s = time.monotonic() + QUIESCE_S
        for reading in list(self._readings):
            assert reading.num_attached == 0
            if _has_ended(reading.read, deadline_s):
                self._end(reading)
                self._residency.abandon(reading.frames)
            else:
                self._left_behind.append(reading)
            self._forget(reading)


def _has_ended(read: StoreRead, deadline_s: float) -> bool:
    """Waits for it, unless it is late."""
    while not (read.has_ended or read.is_late or time.monotonic() >= deadline_s):
        time.sleep(LOOK_S)
    return read.has_ended


def joined(runs: Sequence[Run]) -> list[Run]:
    """The same pages, neighbours from the same place in one run."""
    whole: list[Run] = []
    for run in runs:
        if whole and (whole[-1].kind, whole[-1].origin) == (run.kind, run.origin):
            run = Run(run.kind, whole.pop().num_pages + run.num_pages, run.origin)
        whole.append(run)
    return whole
