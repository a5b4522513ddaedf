# SPDX-License-Identifier: Apache-2.0
"""What a rank is doing now: its last report, and what has been sent to it since.

Invariants
  1. A placed request counts from ``placed`` until a report that counts it itself, or ``ended``: once, never twice, as
     far as ``received_s`` of the report is right.
  2. Reports only go forward in time; an older one than the last is ignored.

One rank is one ``RankLoad``: reported at some moment, plus zero or more requests on their way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec

from banyan.routing.pending_prefixes import PendingPrefixes, PrefixFingerprint


class LoadReport(msgspec.Struct, frozen=True):
    """A rank about itself. Tokens and requests as in ``RankState``; the two totals only grow.

    Attributes:
        received_s: what was sent to the rank until then is counted; None: until ``taken_s``.
        capacity_tokens: what its pool has room for; 0: not told.
        stamp_s: when it was taken by the rank's own clock: two of one stamp are one report. None: not told.
    """

    taken_s: float = 0.0
    received_s: float | None = None
    stamp_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    pending_prefill_tokens: int = 0
    ongoing_tokens: int = 0
    capacity_tokens: int = 0
    unused_tokens: int | None = None
    total_prefill_tokens: int = 0
    total_prefill_us: int = 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Over the rank's life; None before it has prefilled anything."""
        if self.total_prefill_tokens <= 0 or self.total_prefill_us <= 0:
            return None
        return self.total_prefill_tokens * 1e6 / self.total_prefill_us


class SGLangLoad(Protocol):
    """A rank's load by SGLang's names: its snapshot, or what it publishes."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


def report_of(load: SGLangLoad, taken_s: float, unused_tokens: int | None = None) -> LoadReport:
    """The same in Banyan's words, with the room that the directory shows. Of nothing is there less than none: policies
    compare ranks by these numbers."""
    return LoadReport(
        taken_s=taken_s,
        num_running=max(0, load.num_running_reqs),
        num_waiting=max(0, load.num_waiting_reqs),
        pending_prefill_tokens=max(0, load.num_waiting_uncached_tokens),
        ongoing_tokens=max(0, load.num_total_tokens),
        capacity_tokens=max(0, load.max_total_num_tokens),
        unused_tokens=unused_tokens,
        total_prefill_tokens=max(0, load.total_prefill_uncached_tokens),
        total_prefill_us=max(0, load.total_prefill_busy_us),
    )


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    at_s: float
    num_prompt_tokens: int
    num_new_tokens: int


class RankLoad:
    """One rank's report and what is on its way there. Times are seconds of one clock, that of the reports."""

    __slots__ = (
        "_computes_since_s",
        "_on_its_way",
        "last_turn",
        "num_new_tokens",
        "num_prompt_tokens",
        "pending",
        "read_queue_tokens",
        "report",
    )

    def __init__(self) -> None:
        self.report = LoadReport()
        self.last_turn = -1
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0
        self.read_queue_tokens = 0
        self.pending = PendingPrefixes()
        self._on_its_way: deque[_OnItsWay] = deque()
        self._computes_since_s = 0.0
        """Since when what the report's total does not count has been computed."""

    @property
    def num_on_its_way(self) -> int:
        return len(self._on_its_way)

    def placed(
        self,
        turn: int,
        now_s: float,
        *,
        num_prompt_tokens: int,
        num_new_tokens: int,
        prefix_fingerprint: PrefixFingerprint | None = None,
    ) -> None:
        """A request was sent to the rank; ``num_new_tokens`` of its prompt are not cached there.

        It is pending where its prefix fingerprint is given.
        """
        self.last_turn = turn
        self._on_its_way.append(_OnItsWay(now_s, num_prompt_tokens, num_new_tokens))
        self.num_prompt_tokens += num_prompt_tokens
        self.num_new_tokens += num_new_tokens
        if prefix_fingerprint is not None:
            if not len(self.pending):
                self._computes_since_s = now_s
            report = self.report
            before_it = report.total_prefill_tokens + report.pending_prefill_tokens
            self.pending.placed(prefix_fingerprint, before_it + self.num_new_tokens)

    def tokens_until(self, prefix_fingerprint: PrefixFingerprint, num_tokens: int, now_s: float) -> int:
        """What the rank has to compute before it has so many leading tokens of a prompt that it is about to have, by
        the rate of its prefills so far.

        Raises:
            LookupError: when it is not about to have them.
        """
        due_tokens = self.pending.due_tokens(prefix_fingerprint, num_tokens) - self.report.total_prefill_tokens
        since = (now_s - self._computes_since_s) * (self.report.prefill_tokens_per_s or 0.0)
        return max(0, due_tokens - int(max(0.0, since)))

    def unheard_s(self, now_s: float) -> float:
        """For how long something sent to the rank has been in no report; 0 while all is."""
        return max(0.0, now_s - self._on_its_way[0].at_s) if self._on_its_way else 0.0

    def ended(self, at_s: float, num_prompt_tokens: int) -> None:
        """A request that was placed then has ended. Where a report counts it already, a later one will not."""
        for sent in self._on_its_way:
            if (sent.at_s, sent.num_prompt_tokens) == (at_s, num_prompt_tokens):
                self._on_its_way.remove(sent)
                self._is_there(sent)
                return

    def _is_there(self, sent: _OnItsWay) -> None:
        self.num_prompt_tokens -= sent.num_prompt_tokens
        self.num_new_tokens -= sent.num_new_tokens

    def reported(self, report: LoadReport) -> None:
        """The rank's latest report; requests that it must have received by then are in it."""
        if report.taken_s <= self.report.taken_s:
            return
        if report.total_prefill_tokens != self.report.total_prefill_tokens:
            self._computes_since_s = report.taken_s
            # What was being computed when a prompt was placed counted neither as computed nor as waiting: one more
            # batch than its due tokens has to end.
            self.pending.computed(self.report.total_prefill_tokens)
        self.report = report
        received_s = report.taken_s if report.received_s is None else report.received_s
        while self._on_its_way and self._on_its_way[0].at_s < received_s:
            self._is_there(self._on_its_way.popleft())
        # A prompt between two of its chunks is neither waiting nor running.
        # What open sessions hold is in use and is computed by nobody: it does not count.
        is_idle = not any((report.num_running, report.num_waiting, report.pending_prefill_tokens, self.num_on_its_way))
        # Of a pair's decode server, or of one that does not say what it has computed, no total would end it.
        computes_none = report.num_running > 0 and not report.total_prefill_tokens
        if is_idle or computes_none:
            self.pending.clear()
