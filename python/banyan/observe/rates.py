# SPDX-License-Identifier: Apache-2.0
"""What happened between two readings of a server; with one alone, since its start."""

from __future__ import annotations

from dataclasses import dataclass

from banyan.observe.reading import RankReading, Reading


@dataclass(frozen=True, slots=True)
class Rates:
    """``before`` of None: since the start of the ranks. A server that has started anew counts from there, too."""

    now: Reading
    before: Reading | None = None

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
