# SPDX-License-Identifier: Apache-2.0
"""The writes of one rank to one device: offered, admitted or counted away, held back, started in slack, done.

Invariants
  1. The back-log holds at most ``max_backlog_bytes``, waiting and in flight. A page that does not fit is not stored, at
     once: nothing stalls on it.
  2. A page is queued only when its parent is stored or was queued before it: a page whose parent is missing could never
     be found.
  3. Pages start in the order in which they were queued, parents first. A parent may fail while its child is in flight:
     the store then holds an unreachable page until it is evicted, which is waste and not an error.
  4. ``num_by_verdict`` counts every new page once; its QUEUED ones are written, failed, cleared, waiting or in flight.

A page's write: offered -> queued (``offer``) -> in flight (``start``) -> gone (``finish``). ``clear`` forgets those
that wait, as after a flush. Called by one thread; the I/O is the caller's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from banyan.core import PageKey
from banyan.pacing.admission import Verdict, WriteAdmission
from banyan.pacing.gate import DeviceLoad, num_writes_allowed
from banyan.telemetry import Estimate


@dataclass(frozen=True, slots=True)
class PageWrite:
    """One page to be written. ``parent`` is None for the first page of a prompt."""

    key: PageKey
    parent: PageKey | None
    num_bytes: int


class PacedWrites:
    """Decides which page is written, and when."""

    def __init__(
        self,
        *,
        admission: WriteAdmission,
        is_stored: Callable[[PageKey], bool],
        max_backlog_bytes: int,
        first_write_us: float,
    ) -> None:
        """``first_write_us`` is the expected time of one write until one has been measured."""
        if max_backlog_bytes < 0 or first_write_us <= 0:
            raise ValueError(f"max_backlog_bytes {max_backlog_bytes}, first_write_us {first_write_us}: not a limit")
        self._admission = admission
        self._is_stored = is_stored
        self._max_backlog_bytes = max_backlog_bytes
        self._first_write_us = first_write_us
        self._waiting: deque[PageWrite] = deque()
        self._in_flight: dict[PageKey, PageWrite] = {}
        self._pending: set[PageKey] = set()
        self._write_us = Estimate()
        self.backlog_bytes = 0
        self.num_by_verdict: Counter[Verdict] = Counter()
        self.num_written = 0
        self.num_failed = 0
        self.num_cleared = 0

    # ---- offer -------------------------------------------------------------------------------------------------

    def offer(self, page: PageWrite, now_ns: int) -> Verdict:
        """Queue the page, or say why it is not stored. A page that is stored or queued already counts as queued."""
        if page.key in self._pending or self._is_stored(page.key):
            return Verdict.QUEUED
        verdict = self._judge(page, now_ns)
        self.num_by_verdict[verdict] += 1
        if verdict is Verdict.QUEUED:
            self._waiting.append(page)
            self._pending.add(page.key)
            self.backlog_bytes += page.num_bytes
        return verdict

    def _judge(self, page: PageWrite, now_ns: int) -> Verdict:
        verdict = self._admission.judge(page.key, page.num_bytes, now_ns)
        if verdict is not Verdict.QUEUED:
            return verdict
        if page.parent is not None and page.parent not in self._pending and not self._is_stored(page.parent):
            verdict = Verdict.ORPHANED
        elif self.backlog_bytes + page.num_bytes > self._max_backlog_bytes:
            verdict = Verdict.BACKLOG_FULL
        if verdict is not Verdict.QUEUED:
            self._admission.give_back(page.key, page.num_bytes)
        return verdict

    # ---- write -------------------------------------------------------------------------------------------------

    def start(self, load: DeviceLoad, *, slack_us: float) -> list[PageWrite]:
        """The pages to write now; the caller submits them and calls ``finish`` for each."""
        write_us = self._write_us.mean + self._write_us.deviation if self._write_us.count else self._first_write_us
        num_allowed = num_writes_allowed(load, slack_us=slack_us, write_us=write_us)
        started = [self._waiting.popleft() for _ in range(min(num_allowed, len(self._waiting)))]
        for page in started:
            self._in_flight[page.key] = page
        return started

    def finish(self, key: PageKey, *, write_us: float | None) -> None:
        """A started write has ended after ``write_us``; None: it failed, and its page is not stored.

        Pages that wait behind a failed parent fail with it. Their chain may be offered again.

        Raises:
            KeyError: for a page that was not started.
        """
        page = self._in_flight.pop(key)
        self._pending.discard(key)
        self.backlog_bytes -= page.num_bytes
        if write_us is None:
            self.num_failed += 1
            # The bytes stay spent: a failed write may have worn the drive.
            self._admission.give_back(key, 0)
            self._drop_children(key)
        else:
            self.num_written += 1
            self._write_us.observe(write_us)

    def _drop_children(self, key: PageKey) -> None:
        lost = {key}
        kept: deque[PageWrite] = deque()
        for page in self._waiting:
            if page.parent in lost:
                lost.add(page.key)
                self._let_go(page)
                self.num_failed += 1
            else:
                kept.append(page)
        self._waiting = kept

    def clear(self) -> None:
        """Forget what waits. Writes in flight end as usual."""
        for page in self._waiting:
            self._let_go(page)
        self.num_cleared += len(self._waiting)
        self._waiting.clear()

    def _let_go(self, page: PageWrite) -> None:
        self._pending.discard(page.key)
        self.backlog_bytes -= page.num_bytes
        self._admission.give_back(page.key, page.num_bytes)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)
