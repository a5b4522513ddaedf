# SPDX-License-Identifier: Apache-2.0
"""How lately pages were asked for, and how often: their chance to be wanted again.

A tree knows the age of a page as long as it holds it. What comes back, and what does not, shows after the page has gone
as often as before. So the last sight of a page is remembered beyond its stay (``_native.Sights``), and what that sight
says is learnt from what comes back (``banyan.planner.chances``). A rank sees its own prompts, and hears of those of its
peers: what comes back to the node comes back here too, sooner or later. What a prompt in the rank's own queue asks for
is wanted for certain.

Pages go by numbers of 64 bits, whose lowest one says nothing: as ``_native.page_numbers`` gives them.

Invariants
  1. The memory is bounded (``_native.Sights``), and what is remembered is advice.
  2. A prompt teaches ``LESSONS`` times at most, however long it is.
  3. ``_num_waiting`` counts, for each page, the prompts of ``_queued`` that ask for it, whoever else does.

States of a page: unknown -> once -> twice -> ... -> as often as sights are counted; unknown once more when its row goes
to another page. States of a prompt: asked -> served. One thread.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Hashable, Sequence

from banyan import _native
from banyan.planner.chances import Chances, Seen

LESSONS = 8
MOST_LOTS = 1024
LOTS_POOLS = 16
"""Lots are of the last new pages, as many as fill the pools so often."""

TRIES = 4
"""To draw a page that is still known, and not of the prompt that came."""


class Demand:
    """``num_frames``: of the pools whose prompts are heard of here. Ages are in pages: so many were asked for since."""

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._sights = _native.Sights(num_frames)
        self._num_asked = 0
        self._chances = Chances()
        # New pages, one in so many.
        self._lots: deque[int] = deque(maxlen=MOST_LOTS)
        self._pages_per_lot = -(-min(LOTS_POOLS * num_frames, self._sights.num_rows) // MOST_LOTS)
        self._next_lot = 0
        self._rng = random.Random(0)
        self._queued: dict[Hashable, Sequence[int]] = {}
        self._num_waiting: Counter[int] = Counter()

    @property
    def chances(self) -> Chances:
        """What has been learnt."""
        return self._chances

    def asked(self, pages: bytes, prompt: Hashable) -> None:
        """A prompt of these pages has come, from its first on, and waits here; there is at least one.

        ``prompt``: what it is called until it is ``served``.
        """
        self.heard(pages)
        self.served(prompt)
        numbers = self._queued[prompt] = memoryview(pages).cast("q").tolist()
        self._num_waiting.update(numbers)

    def heard(self, pages: bytes) -> None:
        """A prompt of these pages has come to a peer, or to this rank; there is at least one."""
        numbers = memoryview(pages).cast("q")
        num_again = self._sights.num_known(numbers)
        num_lessons = min(LESSONS, num_again)
        came = [
            self._sights.last(numbers[(2 * turn + 1) * num_again // (2 * num_lessons)]) for turn in range(num_lessons)
        ]
        asked_before, self._num_asked = self._num_asked, self._num_asked + len(numbers)
        self._sights.again(numbers[:num_again], self._num_asked)
        self._note_new(numbers[num_again:])
        for wanted in came:
            other = self._drawn_by_lot()
            if wanted[0] and other is not None:
                self._chances.came(self._seen(wanted, asked_before), self._seen(other, asked_before))

    def served(self, prompt: Hashable) -> None:
        """The prompt waits no longer, if it did: the tree holds its pages for it, or it has gone."""
        waiting = self._num_waiting
        for page in self._queued.pop(prompt, ()):
            if waiting[page] == 1:
                del waiting[page]
            else:
                waiting[page] -= 1

    def came(self, pages: bytes) -> None:
        """The tree has these pages of one chain now. Those that no prompt has named, such as an answer's, begin their
        age."""
        numbers = memoryview(pages).cast("q")
        self._note_new(numbers[self._sights.num_known(numbers) :])

    def chance(self, page: int) -> float:
        """Of the page to be wanted, as against other pages; infinite while a prompt waits here that asks for it."""
        if page in self._num_waiting:
            return math.inf
        asked_at, num_sights = self._sights.last(page)
        return self._chances.of((self._num_asked - asked_at) / self._num_frames, num_sights)

    def age(self, page: int) -> int:
        """Pages that were asked for since it was."""
        return self._num_asked - self._sights.last(page)[0]

    def num_sights(self, page: int) -> int:
        """How often the page was asked for, as far as sights are counted."""
        return self._sights.last(page)[1]

    def _seen(self, sight: tuple[int, int], num_asked: int) -> Seen:
        return Seen((num_asked - sight[0]) / self._num_frames, sight[1])

    def _drawn_by_lot(self) -> tuple[int, int] | None:
        """The last sight of a page that the last prompt did not name."""
        for _ in range(TRIES if self._lots else 0):
            sight = self._sights.last(self._lots[int(self._rng.random() * len(self._lots))])
            if 0 < sight[0] < self._num_asked:
                return sight
        return None

    def _note_new(self, numbers: memoryview[int]) -> None:
        self._sights.first(numbers, self._num_asked)
        self._lots.extend(numbers[self._next_lot :: self._pages_per_lot])
        self._next_lot = (self._next_lot - len(numbers)) % self._pages_per_lot
