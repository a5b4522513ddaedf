# SPDX-License-Identifier: Apache-2.0
"""Remote prefetches of a node: pages that other nodes have asked it to bring from its store into its arena.

The page server's thread takes remote prefetches in and answers them; the rank's thread, which owns store and arena,
carries them out.

Invariants
  1. No more than `MAX_REMOTE_PREFETCHES` are taken in, and none of more than ``max_pages``.
  2. What is being brought, and what has been brought and is about to be borrowed, is no more than ``max_pages``, and
     has its room among the remote leases. What has none waits in line, in the order in which it came. The rank is told
     when what it has brought may go.
  3. Every remote prefetch that was taken in is answered once; until then its sender is told every `SAY_S` that it is
     under way.

A remote prefetch: in line -> begun (its room is reserved) -> over -> answered -> borrowed, or its room given back after
`BORROW_S`. In line for longer than anybody waits: answered that nothing came. Closed: all are answered so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.features.nodes.questions import MOST_READ_S
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.wire import Answer, Reading

MAX_REMOTE_PREFETCHES = 64
SAY_S = 0.25
BORROW_S = 2.0
"""Who has been answered borrows when its scheduler has a look: between two forwards."""


@dataclass(frozen=True, slots=True, eq=False)
class RemotePrefetch:
    """Pages wanted in the arena, for question ``number`` of ``sender``."""

    sender: bytes
    number: int
    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The first ``num_pages`` of a remote prefetch are there to be borrowed."""

    remote_prefetch: RemotePrefetch
    num_pages: int
    until_s: float

    @property
    def keys(self) -> Sequence[str]:
        return self.remote_prefetch.keys[: self.num_pages]


class RemotePrefetches:
    """One page server's. ``remote_leases`` is what they have room in; ``wake`` makes the page server's thread ask
    `to_say`. Any thread."""

    def __init__(
        self, *, max_pages: int, remote_leases: RemoteLeases, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """``max_pages``: of one, and of all that have room; more than one rank's part of the arena may be lent."""
        self.max_pages = max_pages
        self._num_held = 0
        self._remote_leases = remote_leases
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._in_line: deque[tuple[float, RemotePrefetch]] = deque()  # since when
        self._begun: set[RemotePrefetch] = set()
        self._said_s: dict[RemotePrefetch, float] = {}
        self._over: list[tuple[RemotePrefetch, int]] = []
        self._brought: dict[tuple[bytes, str], KeptPages] = {}
        self._let_go: list[RemotePrefetch] = []

    # ---- the page server's threads ----------------------------------------------------------------------------

    def ask(self, remote_prefetch: RemotePrefetch) -> bool:
        """Take it in, unless it is too large or too many are here."""
        with self._lock:
            if len(self._said_s) >= MAX_REMOTE_PREFETCHES or len(remote_prefetch.keys) > self.max_pages:
                return False
            now_s = self._clock()
            self._in_line.append((now_s, remote_prefetch))
            self._said_s[remote_prefetch] = now_s
            return True

    def to_say(self) -> list[tuple[bytes, Answer | Reading]]:
        """What is to be said now, and to whom."""
        now_s = self._clock()
        with self._lock:
            said: list[tuple[bytes, Answer | Reading]] = [
                (remote_prefetch.sender, Answer(remote_prefetch.number, num_pages))
                for remote_prefetch, num_pages in self._over
            ]
            self._over.clear()
            for remote_prefetch, at_s in self._said_s.items():
                if at_s + SAY_S <= now_s:
                    said.append((remote_prefetch.sender, Reading(remote_prefetch.number)))
                    self._said_s[remote_prefetch] = now_s
            for place in [place for place, brought in self._brought.items() if brought.until_s <= now_s]:
                self._unreserve(self._end_keeping(place))
        return said

    def take_brought(self, sender: bytes, first_key: str) -> KeptPages | None:
        """What was brought for ``sender``, which borrows it now from that page on: what is before it, it may have got
        meanwhile. It has its room until ``borrowed``, however long that takes."""
        with self._lock:
            if (exact := self._brought.pop((sender, first_key), None)) is not None:
                return exact
            for place, brought in self._brought.items():
                if place[0] == sender and first_key in brought.keys:
                    return self._brought.pop(place)
            return None

    def borrowed(self, brought: KeptPages) -> None:
        """It has been borrowed, or could not."""
        with self._lock:
            self._let_go.append(brought.remote_prefetch)
            self._unreserve(brought.num_pages)

    # ---- the rank's thread -------------------------------------------------------------------------------------

    def take(self) -> list[RemotePrefetch]:
        """Those that are to begin now: the first in line, as far as there is room."""
        if not self._in_line:
            return []
        taken, late_s = [], self._clock() - MOST_READ_S
        with self._lock:
            while self._in_line:
                since_s, remote_prefetch = self._in_line[0]
                if since_s <= late_s:
                    self._is_over(remote_prefetch, 0)
                elif self._reserve(len(remote_prefetch.keys)):
                    self._begun.add(remote_prefetch)
                    taken.append(remote_prefetch)
                else:
                    break
                self._in_line.popleft()
        return taken

    def over(self, remote_prefetch: RemotePrefetch, num_pages: int) -> None:
        """The first ``num_pages`` are in the arena, and no more will come. They stay until ``let_go`` names it."""
        with self._lock:
            self._is_over(remote_prefetch, num_pages)
        self._wake()

    def _is_over(self, remote_prefetch: RemotePrefetch, num_pages: int) -> None:
        if self._said_s.pop(remote_prefetch, None) is None:
            self._let_go.append(remote_prefetch)
            return
        self._over.append((remote_prefetch, num_pages))
        if remote_prefetch not in self._begun:
            return
        self._begun.discard(remote_prefetch)
        num_free = len(remote_prefetch.keys) - num_pages
        if num_pages:
            place = (remote_prefetch.sender, remote_prefetch.keys[0])
            num_free += self._end_keeping(place)
            self._brought[place] = KeptPages(remote_prefetch, num_pages, self._clock() + BORROW_S)
        self._unreserve(num_free)

    def _reserve(self, num_pages: int) -> bool:
        """Take room, where there is so much."""
        if self._num_held + num_pages > self.max_pages or not self._remote_leases.reserve(num_pages):
            return False
        self._num_held += num_pages
        return True

    def _unreserve(self, num_pages: int) -> None:
        self._num_held -= num_pages
        self._remote_leases.unreserve(num_pages)

    def _end_keeping(self, place: tuple[bytes, str]) -> int:
        """How many pages are not kept for a borrower any more."""
        brought = self._brought.pop(place, None)
        if brought is None:
            return 0
        self._let_go.append(brought.remote_prefetch)
        return brought.num_pages

    def let_go(self) -> list[RemotePrefetch]:
        """Those that are over and whose pages nobody is going to borrow any more, since the last call."""
        if not self._let_go:
            return []
        with self._lock:
            gone, self._let_go = self._let_go, []
        return gone

    def end(self) -> None:
        """Answer all of them now: nothing came."""
        with self._lock:
            self._in_line.clear()
            for remote_prefetch in list(self._said_s):
                self._is_over(remote_prefetch, 0)
            for place in list(self._brought):
                self._unreserve(self._end_keeping(place))
        self._wake()
