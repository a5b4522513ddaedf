# SPDX-License-Identifier: Apache-2.0
"""The reads that a library has been asked for; where it has not answered in time, whoever waits for their layers is let
go.

The frames stay lent until the library comes back, for it may still write to them. A watch that ends before its time
says so, and counts as a stall for good: nobody would be let go any more.

A read whose turn has not come is late with the first that is: those that hang may have all the threads that read.
"""

from __future__ import annotations

import threading
import time
from math import inf

from banyan._native import Feed
from banyan.telemetry import start_thread


class Watch:
    """A thread that looks after reads. Any thread may call."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._since_s: dict[Feed, float] = {}  # inf: its turn has not come
        self._late: set[Feed] = set()
        self._has_ended = False
        self._is_off = False
        self.num_stalls = 0
        self._thread = start_thread(
            self._run, name="banyan-store-watch", feature="reading from the store", ended=self._off
        )

    @property
    def is_off(self) -> bool:
        """Its thread has ended by a fault: nothing is read any more."""
        return self._is_off

    @property
    def is_stalled(self) -> bool:
        """Whether a read that was late has still not ended, or would not be seen to be late."""
        return self._is_off or bool(self._late)

    @property
    def num_reads(self) -> int:
        """Those that have been asked for and have not ended."""
        return len(self._since_s)

    def asked(self, feed: Feed, max_reads: int) -> bool:
        """It waits for its turn; False where it does not: the library stalls, or too many reads are under way."""
        with self._changed:
            if self.is_stalled or len(self._since_s) >= max_reads:
                return False
            self._since_s[feed] = inf
            return True

    def begins(self, feed: Feed) -> bool:
        """It waits no more for its turn; whether it did."""
        with self._changed:
            if self._since_s.get(feed) != inf:
                return False
            self._since_s[feed] = time.monotonic()
            self._changed.notify()
            return True

    def moves(self, feed: Feed) -> None:
        """The library has answered, and is asked for more."""
        with self._changed:
            if feed in self._since_s:
                self._since_s[feed] = time.monotonic()

    def ended(self, feed: Feed) -> None:
        with self._changed:
            self._since_s.pop(feed, None)
            self._late.discard(feed)

    def close(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        self._thread.join()
        with self._changed:
            waiting = [feed for feed, since_s in self._since_s.items() if since_s == inf]
            self._since_s.clear()
            self._late.clear()
        # What waits behind a library that hangs does not begin any more.
        for feed in waiting:
            feed.end()

    def _run(self) -> None:
        with self._changed:
            while not self._has_ended:
                begun = [since_s for feed, since_s in self._since_s.items() if feed not in self._late and since_s < inf]
                now_s = time.monotonic()
                self._changed.wait(min(begun) + self._stall_s - now_s if begun else None)
                self._look()

    def _off(self) -> None:
        """Nobody looks after reads any more: those that are under way are let go, and there is no other."""
        with self._changed:
            self._is_off = True
            for feed in self._since_s:
                feed.be_late()

    def _look(self) -> None:
        now_s = time.monotonic()
        for feed, since_s in self._since_s.items():
            if feed not in self._late and now_s - since_s >= self._stall_s:
                self._late.add(feed)
                self.num_stalls += 1
                feed.be_late()
        behind = {feed for feed, since_s in self._since_s.items() if since_s == inf} if self._late else set()
        for feed in behind - self._late:
            self._late.add(feed)
            feed.be_late()
