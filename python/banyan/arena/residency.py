# SPDX-License-Identifier: Apache-2.0
"""Which page lies in which frame of this rank's part of the host arena, and which page goes first.

Invariants
  1. Every frame is in exactly one state, and a key has at most one frame.
  2. Only resident frames are published on the frame table. A frame that is held, or that a peer reads, is never handed
     out.
  3. What is in ``kept`` stays while it could not fill more than ``MOST_KEPT`` of the frames; where it could, it goes
     when nothing else can.
  4. A page that was found to be kept is set aside until it is no more: it is walked past once, and not by every claim.
  5. Of two pages that nobody asked for since they came, the one further from the root of its prefix goes first: the
     pages of a prefix queue for eviction in reverse, and a lease of a page is a lease of all pages before it.

States of a frame: without memory --grow--> free --claim--> filling --publish--> resident --evict--> free, by way of
quarantine while peers read it; filling --abandon--> free. Hold and unhold count users of a filling or resident frame; a
held one stays, and after a reset becomes free when it is let go.

Eviction is a clock: a page that was leased since the hand last passed gets another round, as far as one claim goes
(``MOST_PASSED``). Who asks which pages were leased (``wanted_in``) changes nothing of that. One thread.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from banyan.ports import ArenaFrameTable

MOST_KEPT = 0.5
"""Of the frames, for pages that stay whoever needs room."""

MOST_EXAMINED = 4096
"""Frames at a time."""

MOST_PASSED = 1 << 14
"""One claim that has given so many pages another round takes the next one, marked or not: the scheduler waits."""

Queue = OrderedDict[int, None]
"""Frames, the next to be examined first."""


def frame_ids(numbers: bytes) -> list[int]:
    """Frames as the native core returns them."""
    return memoryview(numbers).cast("q").tolist()


class FrameWatch(Protocol):
    """Is told what becomes of frames, before anybody can act on it."""

    def taken(self, frames: Sequence[int]) -> None:
        """They are about to be filled."""
        ...

    def filled(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        """They have just become resident."""
        ...

    def evicted(self, keys: Sequence[str]) -> None:
        """These pages are resident no more; their frames keep them until they are taken."""
        ...

    def emptied(self) -> None:
        """No page is resident any more, and none is to be found again."""
        ...


class Residency:
    """The frames of one rank's part of the arena. ``kept``: keys of pages that go last; it changes."""

    def __init__(self, frame_table: ArenaFrameTable, num_frames: int, kept: Collection[str] = ()) -> None:
        self._frame_table = frame_table
        self._kept = kept
        self._watches: list[FrameWatch] = []
        self._free = list(range(num_frames - 1, -1, -1))
        self._filling: set[int] = set()
        self._key_of: dict[int, str] = {}  # resident frames: each is queued or set aside
        self._queue: Queue = OrderedDict()
        self._aside: Queue = OrderedDict()
        self._frame_of: dict[str, int] = {}
        self._holds: Counter[int] = Counter()
        self._leaving: set[int] = set()
        self._wanted: set[int] = set()  # resident frames whose marks were read, and that still get another round
        self._num_passed = 0  # by the present claim, since they are marked or held
        self.num_frames = num_frames
        self.num_evicted = 0
        self.last_evicted: Sequence[str] = ()
        """The pages whose frames the last claim has taken."""

    @property
    def num_resident(self) -> int:
        return len(self._key_of)

    @property
    def keys(self) -> list[str]:
        """The pages that are resident."""
        return list(self._frame_of)

    @property
    def num_free(self) -> int:
        """Frames that can be claimed without evicting a page, but for those that come out of quarantine."""
        return len(self._free)

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    def watch(self, watch: FrameWatch) -> None:
        """Tell ``watch`` from now on."""
        self._watches.append(watch)

    def grow(self, num_frames: int) -> None:
        """The next frames have got memory."""
        # Behind the others: memory that was used before is used again first.
        self._free = [*range(self.num_frames + num_frames - 1, self.num_frames - 1, -1), *self._free]
        self.num_frames += num_frames

    def adopt(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        """Free ``frames`` hold the complete pages of ``keys`` already; the first is the next to go. Publish them."""
        adopted = set(frames)
        self._free = [frame for frame in self._free if frame not in adopted]
        self._key_of.update(zip(frames, keys, strict=True))
        self._queue.update(dict.fromkeys(frames))
        self._frame_of.update(zip(keys, frames, strict=True))
        self._frame_table.publish(array("q", frames), list(keys))

    def frame(self, key: str) -> int | None:
        """Where the page of ``key`` is resident."""
        return self._frame_of.get(key)

    def keys_in(self, frames: Iterable[int]) -> list[str]:
        """The pages that are resident in ``frames``."""
        return [self._key_of[frame] for frame in frames if frame in self._key_of]

    def wanted_in(self, frames: Iterable[int]) -> list[str]:
        """Of the pages in ``frames`` those that were leased since they came, or since a claim last passed them over."""
        frames = array("q", frames)
        touched = frame_ids(self._frame_table.take_touched(frames))
        self._wanted.update(frame for frame in touched if frame in self._key_of)
        return self.keys_in(self._wanted.intersection(frames))

    def claim(self, num_frames: int, sparing: Sequence[str] = (), keys: Sequence[str] = ()) -> list[int]:
        """Frames to fill with the first pages of ``keys``, evicting what goes first but the pages of ``sparing``; fewer
        than asked for when the rest is held or being read. Whose the pages are matters to nobody here."""
        # A frame table that was emptied while a reader stayed gives back what is resident here all the same.
        if drained := self._frame_table.drain():
            self._let_go([frame for frame in frame_ids(drained) if frame not in self._key_of])
        missing = num_frames - len(self._free)
        self.last_evicted = ()
        if missing > 0:
            spared = [self._frame_of[key] for key in sparing if key in self._frame_of]
            self.hold(spared)
            self._evict(missing)
            self.unhold(spared)
        num_left = max(0, len(self._free) - num_frames)
        claimed = self._free[num_left:][::-1]
        del self._free[num_left:]
        self._filling.update(claimed)
        for watch in self._watches:
            watch.taken(claimed)
        return claimed

    def owner_of(self, keys: Sequence[str]) -> str | None:
        """For whom ``claim`` finds frames where it may find none for others; None: it finds the same for all."""
        return None

    def publish(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        """The claimed ``frames`` hold the complete pages of ``keys``, in the order of the prefix: publish them.

        A page that is resident already keeps its frame; the new one is free again.
        """
        new = dict(zip(keys, frames, strict=True))
        if not self._frame_of.keys().isdisjoint(new) or len(new) < len(frames):
            new = {key: frame for frame, key in zip(frames, keys, strict=True) if key not in self._frame_of}
            kept = set(new.values())
            self.abandon([frame for frame in frames if frame not in kept])
        new_frames, new_keys = list(new.values()), list(new)
        self._filling.difference_update(new_frames)
        self._key_of.update(zip(new_frames, new_keys, strict=True))
        self._queue.update(dict.fromkeys(reversed(new_frames)))
        self._frame_of.update(new)
        self._frame_table.publish(array("q", new_frames), new_keys)
        for watch in self._watches:
            watch.filled(new_frames, new_keys)

    def abandon(self, frames: Sequence[int]) -> None:
        """Claimed frames that will not be filled."""
        self._filling.difference_update(frames)
        self._free += frames

    def hold(self, frames: Sequence[int]) -> None:
        """Keep these frames where they are until ``unhold``."""
        self._holds.update(frames)

    def unhold(self, frames: Sequence[int]) -> None:
        self._holds.subtract(frames)
        for frame in frames:
            if self._holds[frame] == 0:
                del self._holds[frame]
                if frame in self._leaving:
                    self._leaving.remove(frame)
                    self._free.append(frame)

    def _let_go(self, frames: Sequence[int]) -> None:
        """No page is in them any more: they are free, those that are held when they are held no longer."""
        held = [frame for frame in frames if frame in self._holds]
        self._leaving.update(held)
        self._free += [frame for frame in frames if frame not in self._leaving] if held else frames

    def reset(self) -> None:
        """Evict everything. What somebody still fills stays his until he abandons it."""
        self._let_go(frame_ids(self._frame_table.retire(array("q", self._key_of))))
        gone = self.keys
        self._key_of.clear()
        self._wanted.clear()
        self._queue.clear()
        self._aside.clear()
        self._frame_of.clear()
        for watch in self._watches:
            watch.evicted(gone)
            watch.emptied()

    def demote(self, keys: Sequence[str]) -> int:
        """Of the pages of a chain those that are resident, and not kept, go next, the last one first; how many."""
        frames = [self._frame_of[key] for key in keys if key in self._frame_of and key not in self._kept]
        self._frame_table.take_touched(array("q", frames))
        self._wanted.difference_update(frames)
        for frame in frames:
            self._queue.move_to_end(frame, last=False)
        return len(frames)

    def kept_no_more(self, keys: Sequence[str]) -> list[int]:
        """These pages have left ``kept``: what was set aside queues again, and is examined last. The frames of that."""
        frames = [self._frame_of[key] for key in reversed(keys) if self._frame_of.get(key) in self._aside]
        for frame in frames:
            del self._aside[frame]
            self._queue[frame] = None
        return frames

    def _evict(self, num_frames: int) -> None:
        victims: list[int] = []
        gone: list[str] = []
        self._num_passed = 0
        self._choose(num_frames, victims, gone, self._queue)
        if len(victims) < num_frames and len(self._kept) > MOST_KEPT * self.num_frames:
            self._choose(num_frames, victims, gone, self._aside)
        if self._num_passed >= MOST_PASSED:
            # Their marks are not those of the pages that come into these frames.
            self._frame_table.take_touched(array("q", victims))
            self._wanted.difference_update(victims)
        self.num_evicted += len(victims)
        self.last_evicted = gone
        for watch in self._watches:
            watch.evicted(gone)
        self._free += frame_ids(self._frame_table.retire(array("q", victims)))

    def _choose(self, num_frames: int, victims: list[int], gone: list[str], queue: Queue) -> None:
        self._choose_from(lambda most: list(islice(queue, most)), len(queue), num_frames, victims, gone, queue)

    def _choose_from(
        self,
        following: Callable[[int], list[int]],
        num_queued: int,
        num_frames: int,
        victims: list[int],
        gone: list[str],
        queue: Queue,
    ) -> None:
        """Victims until there are ``num_frames``, of the ``num_queued`` frames that ``following`` names."""
        # Twice round: the first may only take the marks away, of more and more frames at a time.
        num_to_examine, num_at_once = 2 * num_queued, 1
        while num_to_examine > 0 and len(victims) < num_frames:
            candidates = following(min(num_to_examine, max(num_frames - len(victims), num_at_once)))
            if not candidates:
                return
            num_to_examine -= len(candidates)
            num_at_once = min(2 * num_at_once, MOST_EXAMINED)
            self._examine(candidates, num_frames, victims, gone, queue)

    def _examine(
        self, candidates: Sequence[int], num_frames: int, victims: list[int], gone: list[str], queue: Queue
    ) -> list[int]:
        """Those of the candidates that are examined last from now on, or are set aside."""
        touched: set[int] = set()
        if self._num_passed < MOST_PASSED:
            touched.update(frame_ids(self._frame_table.take_touched(array("q", candidates))))
            if self._wanted:
                touched.update(self._wanted.intersection(candidates))
                self._wanted.difference_update(candidates)
        passed: list[int] = []
        for frame in candidates:
            if queue is self._queue and self._key_of[frame] in self._kept:
                del queue[frame]
                self._aside[frame] = None
                passed.append(frame)
            elif frame in touched or frame in self._holds:
                queue.move_to_end(frame)
                passed.append(frame)
                self._num_passed += 1
            elif len(victims) < num_frames:
                del queue[frame]
                victims.append(frame)
                gone.append(self._key_of.pop(frame))
                del self._frame_of[gone[-1]]
        return passed
