# SPDX-License-Identifier: Apache-2.0
"""What happened between two readings of a server; with one alone, since its start."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from banyan.observe.reading import RankReading, Reading

ALERT_S, WEAR_S = 300.0, 6 * 3600.0
"""Over which time alerts are judged, and the wear of drives."""

NUM_STEPS = 10
"""Readings that are kept of each."""


@dataclass(frozen=True, slots=True)
class Rates:
    """``before`` of None: since the start of the ranks. A server that has started anew counts from there, too.
    ``ago``: what was seen so many seconds ago; None while nothing was."""

    now: Reading
    before: Reading | None = None
    ago: Mapping[float, Reading | None] = field(default_factory=dict)

    def over(self, window_s: float) -> Rates:
        """The same over so long; since the start, where nobody looked so long ago."""
        return replace(self, before=self.ago.get(window_s, self.before))

    @property
    def is_since_start(self) -> bool:
        return self.before is None

    def seconds(self, rank: RankReading) -> float:
        """How long a rank was watched."""
        old = self._old(rank)
        # By the rank's own clock: whoever looks may have set his.
        return max(rank.up_s if old is None else rank.up_s - old.up_s, 1e-3)

    def grown(self, rank: RankReading, name: str) -> float:
        """By how much a counter of a rank has grown."""
        old = self._old(rank)
        return rank.value(name) - (0.0 if old is None else old.value(name))

    def per_s(self, rank: RankReading, name: str) -> float:
        return self.grown(rank, name) / self.seconds(rank)

    def total_grown(self, name: str) -> float:
        return sum(self.grown(rank, name) for rank in self.now.ranks)

    def total_per_s(self, name: str) -> float:
        return sum(self.per_s(rank, name) for rank in self.now.ranks)

    def _old(self, rank: RankReading) -> RankReading | None:
        """The same rank in the reading before; None when it has started since."""
        if self.before is None:
            return None
        for old in self.before.ranks:
            if (old.dp_rank, old.rid_nonce) == (rank.dp_rank, rank.rid_nonce) and old.up_s <= rank.up_s:
                return old
        return None


class Looks:
    """The readings of a server that a new one is compared with: the last one and, numbers alone, those of some time
    ago."""

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._kept: dict[float, deque[Reading]] = {window_s: deque() for window_s in (ALERT_S, WEAR_S)}

    def rates(self, now: Reading) -> Rates:
        """What happened until ``now``, which is the last reading from here on."""
        rates = Rates(now, self._last, {window_s: self._ago(window_s, now) for window_s in self._kept})
        self._last = now
        return rates

    def _ago(self, window_s: float, now: Reading) -> Reading | None:
        kept = self._kept[window_s]
        while kept and kept[-1].taken_s > now.taken_s:
            # Whoever looks has set his clock.
            kept.pop()
        while len(kept) > 1 and now.taken_s - kept[1].taken_s >= window_s:
            kept.popleft()
        ago = kept[0] if kept and now.taken_s - kept[0].taken_s >= window_s else None
        if not kept or now.taken_s - kept[-1].taken_s >= window_s / NUM_STEPS:
            ranks = (replace(rank, prompts=(), plans=(), changing_lines=()) for rank in now.ranks)
            kept.append(replace(now, ranks=tuple(ranks)))
        return ago
