# SPDX-License-Identifier: Apache-2.0
"""How lately the pages of one rank were asked for, and how often: their chance to be wanted again.

A tree knows the age of a page as long as it holds it. What comes back, and what does not, shows after the page has gone
as often as before. So the last sight of a page is remembered beyond its stay, and what that sight says is learnt from
what comes back (``banyan.planner.chances``). What a prompt in the queue asks for is wanted for certain.

Invariants
  1. The memory is bounded: ``ROWS_PER_FRAME`` rows for each frame of the pool, 8 bytes each. Of two pages that meet in
     one row the later one stays.
  2. What is remembered is advice. Two pages of one fingerprint are taken for one, once in some four million.
  3. A prompt teaches ``LESSONS`` times at most, however long it is.

States of a page: unknown -> once -> twice -> ... -> ``MOST_SIGHTS`` times; unknown once more when its row goes to
another page. States of a prompt: asked -> served. One thread.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Hashable, Sequence

from banyan.planner.chances import Chances, Seen

ROWS_PER_FRAME = 16
"""What returns after as many pages as fill the pool some ten times is still known."""

LEAST_ROWS, MOST_ROWS = 1 << 12, 1 << 22
"""32 kB and 32 MB."""

SIGHTS_BITS = 3
MOST_SIGHTS = 1 << SIGHTS_BITS

STAMP = (1 << 42) - 1
"""Of a row, the bits that say when its page was last asked for, and how often; the others are its fingerprint."""

COUNT, FINGERPRINT = MOST_SIGHTS - 1, ~STAMP

LESSONS = 8
MOST_LOTS = 1024
TRIES = 4
"""To draw a page that is still known, and not of the prompt that came."""


class Demand:
    """``num_frames``: of the rank's pool. Ages are in pages: so many were asked for since."""

    def __init__(self, num_frames: int) -> None:
        num_rows = min(max(1 << (ROWS_PER_FRAME * num_frames - 1).bit_length(), LEAST_ROWS), MOST_ROWS)
        self._mask = num_rows - 1
        self._num_frames = num_frames
        # A stamp is a time, in pages asked for, and behind it how often the page was asked for, less one.
        self._rows = array("q", bytes(8 * num_rows))
        self._num_asked = 0
        self._chances = Chances()
        # New pages, one in so many, as far back as pages are remembered.
        self._lots: deque[int] = deque(maxlen=MOST_LOTS)
        self._pages_per_lot = -(-ROWS_PER_FRAME * num_frames // MOST_LOTS)
        self._next_lot = 0
        self._rng = random.Random(0)
        self._queued: dict[Hashable, int] = {}
        self._queued_at: set[int] = set()

    @property
    def chances(self) -> Chances:
        """What has been learnt."""
        return self._chances

    def asked(self, keys: Sequence[Hashable], prompt: Hashable) -> None:
        """A prompt of these pages has come, from its first on, and waits; ``keys`` is not empty.

        ``prompt``: what it is called until it is ``served``.
        """
        # A key is a hash already; Python's own of it is quick and never leaves the process.
        numbers = list(map(hash, keys))
        # Whoever asked for a page has asked for those before it, also where their rows are lost.
        num_again = self._num_known(numbers)
        num_lessons = min(LESSONS, num_again)
        came = [self._stamp(numbers[(2 * turn + 1) * num_again // (2 * num_lessons)]) for turn in range(num_lessons)]
        asked_before, self._num_asked = self._num_asked, self._num_asked + len(keys)
        self._write_again(numbers[:num_again])
        self._write_first(numbers[num_again:])
        for stamp in filter(None, came):
            other = self._drawn_by_lot()
            if other is not None:
                self._chances.came(self._seen(stamp, asked_before), self._seen(other, asked_before))
        self.served(prompt)
        self._queued[prompt] = self._num_asked
        self._queued_at.add(self._num_asked)

    def served(self, prompt: Hashable) -> None:
        """The prompt waits no longer, if it did: the tree holds its pages for it, or it has gone."""
        self._queued_at.discard(self._queued.pop(prompt, -1))

    def came(self, keys: Sequence[Hashable]) -> None:
        """The tree has these pages now. Those that no prompt has named, such as an answer's, begin their age."""
        self._write_first([number for number in map(hash, keys) if not self._stamp(number)])

    def chance(self, key: Hashable) -> float:
        """Of the page to be wanted, as against other pages; infinite while a prompt waits that asks for it."""
        number = hash(key)
        row = self._rows[number & self._mask]
        # As ``_stamp``, without its call: every look at a leaf asks.
        stamp = 0 if (row ^ number) & FINGERPRINT else row & STAMP
        asked_at = stamp >> SIGHTS_BITS
        if asked_at in self._queued_at:
            return math.inf
        return self._chances.of((self._num_asked - asked_at) / self._num_frames, (stamp & COUNT) + 1)

    def age(self, key: Hashable) -> int:
        """Pages that were asked for since it was."""
        return self._num_asked - (self._stamp(hash(key)) >> SIGHTS_BITS)

    def num_sights(self, key: Hashable) -> int:
        """How often the page was asked for; ``MOST_SIGHTS`` also when it was more often."""
        return (self._stamp(hash(key)) & COUNT) + 1

    def _seen(self, stamp: int, num_asked: int) -> Seen:
        return Seen((num_asked - (stamp >> SIGHTS_BITS)) / self._num_frames, (stamp & COUNT) + 1)

    def _stamp(self, number: int) -> int:
        """0, as of a page that was asked for before all others, when it is not known."""
        row = self._rows[number & self._mask]
        return 0 if (row ^ number) & FINGERPRINT else row & STAMP

    def _num_known(self, numbers: Sequence[int]) -> int:
        """How many leading pages end with one that is known."""
        return next((place + 1 for place in range(len(numbers) - 1, -1, -1) if self._stamp(numbers[place])), 0)

    def _drawn_by_lot(self) -> int | None:
        """The stamp of a page that the last prompt did not name."""
        for _ in range(TRIES if self._lots else 0):
            stamp = self._stamp(self._lots[int(self._rng.random() * len(self._lots))])
            if stamp and stamp >> SIGHTS_BITS < self._num_asked:
                return stamp
        return None

    def _write_first(self, numbers: Sequence[int]) -> None:
        rows, mask, stamp = self._rows, self._mask, self._num_asked << SIGHTS_BITS
        for number in numbers:
            rows[number & mask] = number & FINGERPRINT | stamp
        self._lots.extend(numbers[self._next_lot :: self._pages_per_lot])
        self._next_lot = (self._next_lot - len(numbers)) % self._pages_per_lot

    def _write_again(self, numbers: Sequence[int]) -> None:
        """A page was asked for at least as often as those behind it, also where its row is lost."""
        rows, mask, asked_at = self._rows, self._mask, self._num_asked << SIGHTS_BITS
        num_before, stamp = 0, asked_at | 1
        for number in reversed(numbers):
            row = rows[number & mask]
            if not (row ^ number) & FINGERPRINT and row & COUNT > num_before:
                num_before = row & COUNT
                stamp = asked_at | min(num_before + 1, COUNT)
            rows[number & mask] = number & FINGERPRINT | stamp
