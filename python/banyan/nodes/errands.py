# SPDX-License-Identifier: Apache-2.0
"""Errands of a node: pages that other nodes have asked it to bring from its store into its arena.

The door's thread takes errands in and answers them; the rank's thread, which owns store and arena, carries them out.

Invariants
  1. No more than `MAX_ERRANDS`, and ``max_pages``, are taken at once.
  2. Every errand that was taken is answered once; until then its sender is told every `SAY_S` that it is under way.

An errand: asked -> taken -> over -> answered. Closed: all are answered that nothing came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.nodes.wire import Answer, Reading

MAX_ERRANDS = 64
SAY_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """Pages wanted in the arena, for question ``number`` of ``sender``."""

    sender: bytes
    number: int
    keys: Sequence[str]


class Errands:
    """One door's. ``wake`` makes the door's thread ask `to_say`. Any thread."""

    def __init__(self, *, max_pages: int, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._max_pages = max_pages
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._asked: list[Errand] = []
        self._said_s: dict[Errand, float] = {}  # taken ones
        self._over: list[tuple[Errand, int]] = []

    @property
    def num_under_way(self) -> int:
        return len(self._said_s)

    # ---- the door's thread -------------------------------------------------------------------------------------

    def ask(self, errand: Errand) -> bool:
        """Take it, unless too much is under way."""
        with self._lock:
            num_pages = sum(len(one.keys) for one in self._said_s) + len(errand.keys)
            if len(self._said_s) >= MAX_ERRANDS or num_pages > self._max_pages:
                return False
            self._asked.append(errand)
            self._said_s[errand] = self._clock()
            return True

    def to_say(self) -> list[tuple[bytes, Answer | Reading]]:
        """What is to be said now, and to whom."""
        now_s = self._clock()
        with self._lock:
            said: list[tuple[bytes, Answer | Reading]] = [
                (errand.sender, Answer(errand.number, num_pages)) for errand, num_pages in self._over
            ]
            self._over.clear()
            for errand, at_s in self._said_s.items():
                if at_s + SAY_S <= now_s:
                    said.append((errand.sender, Reading(errand.number)))
                    self._said_s[errand] = now_s
        return said

    # ---- the rank's thread -------------------------------------------------------------------------------------

    def take(self) -> list[Errand]:
        """Those that have come since the last call."""
        if not self._asked:
            return []
        with self._lock:
            taken, self._asked = self._asked, []
        return taken

    def over(self, errand: Errand, num_pages: int) -> None:
        """The first ``num_pages`` are in the arena, and no more will come."""
        with self._lock:
            if self._said_s.pop(errand, None) is None:
                return
            self._over.append((errand, num_pages))
        self._wake()

    def end(self) -> None:
        """Answer all of them now: nothing came."""
        with self._lock:
            self._over += [(errand, 0) for errand in self._said_s]
            self._said_s.clear()
            self._asked.clear()
        self._wake()
