# SPDX-License-Identifier: Apache-2.0
"""How lately the pages of one rank were asked for, and whether more than once: their chance to be wanted again.

A tree knows the age of a page as long as it holds it. What tells a hot set from a scan is whether a page comes back,
and that shows after the page has gone as often as before. So the last sight of a page is remembered beyond its stay.

How much more likely a page comes that has come before is not assumed but counted: of the sights that were first ones,
and of the others, how many were followed by one more. In a scan beside a hot set hardly any against nearly all; in
conversations, whose turns all come back but for the last, about as many, and then age alone decides.

Invariants
  1. The memory is bounded: ``ROWS_PER_FRAME`` rows for each frame of the pool, 8 bytes each. Of two pages that meet in
     one row the later one stays.
  2. What is remembered is advice. Two pages of one fingerprint are taken for one, once in some ten million.

States of a page: unknown -> once -> again; unknown once more when its row goes to another page. One thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

ROWS_PER_FRAME = 16
"""What returns after as many pages as fill the pool some ten times is still known."""

LEAST_ROWS, MOST_ROWS = 1 << 12, 1 << 22
"""32 kB and 32 MB."""

STAMP = (1 << 40) - 1
"""Of a row, the bits that say when its page was last asked for; the others are the page's fingerprint."""

HALF_LIFE_POOLS = 8
"""What was counted this many pools of pages ago counts half."""

DOUBT_POOLS = 0.16
"""Pages of each kind, over those of a pool, that are taken to have come back at even odds before any was counted."""

MOST_AGAIN_LASTS = 16.0


class Demand:
    """``num_frames``: of the rank's pool. Ages are in pages: so many were asked for since."""

    def __init__(self, num_frames: int) -> None:
        num_rows = min(max(1 << (ROWS_PER_FRAME * num_frames - 1).bit_length(), LEAST_ROWS), MOST_ROWS)
        self._mask = num_rows - 1
        # A stamp is a time, doubled, and one more when that was not the first time.
        self._rows = array("q", bytes(8 * num_rows))
        self._num_asked = 0
        self._half_life_pages = HALF_LIFE_POOLS * num_frames
        self._doubt_pages = DOUBT_POOLS * num_frames
        # First sights, and others: how many there were, and how many were followed by one more.
        self._sights, self._returns = [0.0, 0.0], [0.0, 0.0]
        self._again_lasts = 1.0

    @property
    def again_lasts(self) -> float:
        """A page that was asked for more than once stays this many times as long as one that was not."""
        return self._again_lasts

    def asked(self, keys: Sequence[Hashable]) -> None:
        """A prompt of these pages has come, from its first on; ``keys`` is not empty."""
        # A key is a hash already; Python's own of it is quick and never leaves the process.
        numbers = list(map(hash, keys))
        # Whoever asked for a page has asked for those before it, also where their rows are lost.
        num_again = self._last_known(numbers, 0)
        num_thrice = self._last_known(numbers[:num_again], 1)
        self._learn(len(keys) - num_again, num_again, num_again - num_thrice, num_thrice)
        self._num_asked += len(keys)
        stamp = 2 * self._num_asked
        self._write(numbers[:num_again], stamp + 1)
        self._write(numbers[num_again:], stamp)

    def came(self, keys: Sequence[Hashable]) -> None:
        """The tree has these pages now. Those that no prompt has named, such as an answer's, begin their age."""
        new = [number for number in map(hash, keys) if not self._stamp(number)]
        self._write(new, 2 * self._num_asked)
        self._sights[0] += len(new)

    def age(self, key: Hashable) -> float:
        """The age of a page that would be wanted as likely and was asked for once."""
        stamp = self._stamp(hash(key))
        age = float(self._num_asked - (stamp >> 1))
        return age / self._again_lasts if stamp & 1 else age

    def is_again(self, key: Hashable) -> bool:
        """Whether the page is known to have been asked for more than once."""
        return bool(self._stamp(hash(key)) & 1)

    def _stamp(self, number: int) -> int:
        """0, as of a page that was asked for before all others, when it is not known."""
        row = self._rows[number & self._mask]
        return 0 if (row ^ number) & ~STAMP else row & STAMP

    def _last_known(self, numbers: Sequence[int], again: int) -> int:
        """How many leading pages end with one that is known; ``again`` 1: to have been asked for more than once."""
        rows, mask = self._rows, self._mask
        for place in range(len(numbers) - 1, -1, -1):
            row = rows[numbers[place] & mask]
            if not (row ^ numbers[place]) & ~STAMP and row & STAMP and row & 1 >= again:
                return place + 1
        return 0

    def _write(self, numbers: Iterable[int], stamp: int) -> None:
        rows, mask = self._rows, self._mask
        for number in numbers:
            rows[number & mask] = number & ~STAMP | stamp

    def _learn(self, num_first: int, num_again: int, num_returned_first: int, num_returned_again: int) -> None:
        fade = 0.5 ** ((num_first + num_again) / self._half_life_pages)
        counts = ((num_first, num_returned_first), (num_again, num_returned_again))
        chances = []
        for kind, (num_sights, num_returns) in enumerate(counts):
            self._sights[kind] = self._sights[kind] * fade + num_sights
            self._returns[kind] = self._returns[kind] * fade + num_returns
            chances.append((self._returns[kind] + self._doubt_pages) / (self._sights[kind] + 2 * self._doubt_pages))
        # Squared: the two kinds are mixtures, and their means are nearer to each other than most of their pages.
        self._again_lasts = min(max((chances[1] / chances[0]) ** 2, 1.0), MOST_AGAIN_LASTS)
