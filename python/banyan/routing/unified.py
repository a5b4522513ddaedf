# SPDX-License-Identifier: Apache-2.0
"""Unified: the rank with the lowest expected time to first token, be it by computing or by fetching from a peer.

"Elastic P2P vs PD-Combined" (3.9): queue + prefill + transfer, with a soft preference for the session's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.displacement import displaced
from banyan.routing.view import Choice, Query, RankState, Reason, TieBreaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Unified:
    """Rates of one rank.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second, for a rank that has not measured it.
        fetch_tokens_per_s: tokens of KV copied from a peer per second.
        fetch_overhead_s: added to every fetch.
        session_factor: the session's rank is kept while it costs at most this much times the best.

    The defaults are 7,000 tokens/s and 0.1 s from the same source; the fetch rate is NVLink-free PCIe 4.0 x16
    (25 GB/s) at 100 KB of KV per token. A caller with measured rates passes them.
    """

    prefill_tokens_per_s: float = 7_000.0
    fetch_tokens_per_s: float = 250_000.0
    fetch_overhead_s: float = 0.1
    session_factor: float = 2.0

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_s > 0 and self.fetch_tokens_per_s > 0):
            raise ValueError("rates are above 0")
        if not (self.fetch_overhead_s >= 0 and self.session_factor >= 1):
            raise ValueError("fetch_overhead_s is at least 0 and session_factor at least 1")

    def expected_s(self, query: Query, state: RankState) -> float:
        """Queue + prefill + transfer, in seconds; whichever of computing and fetching the tail is faster. And what
        others will have to compute again."""
        rate = state.prefill_tokens_per_s or self.prefill_tokens_per_s
        own_s = query.new_on(state.rank) / rate
        fetchable = query.fetchable_on(state.rank)
        missing = fetchable - query.cached_on(state.rank)
        if missing > 0:
            fetch_s = self.fetch_overhead_s + missing / self.fetch_tokens_per_s
            own_s = min(own_s, fetch_s + (query.num_prompt_tokens - fetchable) / rate)
        return (state.pending_prefill_tokens + displaced(query, state)) / rate + own_s

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        expected_s = {state.rank: self.expected_s(query, state) for state in candidates}
        own = query.session_rank
        if own in expected_s and expected_s[own] <= self.session_factor * min(expected_s.values()):
            return Choice(own, Reason.SESSION)
        # Requests break a tie: pending prefill says nothing of a rank that only decodes.
        return argmin(lambda state: (expected_s[state.rank], state.num_requests), query, candidates, tie_breaks)
