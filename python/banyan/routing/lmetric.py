# SPDX-License-Identifier: Apache-2.0
"""LMetric: (pending prefill tokens + new tokens of this request) x requests. No session rule, no weights.

After LMetric (OSDI 2026) as "Elastic P2P vs PD-Combined" (3.4, corrected) gives it. The new tokens make a soft
affinity: a rank that holds the prefix has less to compute. Where ranks fetch from each other, what any of them can
fetch is not new on any: there a prefix decides between equally busy ranks only, and draws nobody to a busy one. What
the request would push out of a full pool counts as work, for it will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.displacement import displaced
from banyan.routing.view import Choice, Query, RankState, TieBreaks


def lmetric(query: Query, state: RankState) -> int:
    """The score in token-requests; lower is better.

    This request counts too: an idle rank would otherwise score 0 whatever it had to compute.
    """
    num_tokens = state.pending_prefill_tokens + query.computed_on(state.rank) + displaced(query, state)
    return num_tokens * (state.num_requests + 1)


@dataclass(frozen=True, slots=True)
class LMetric:
    """The rank with the lowest score; of several, the one with the least to fetch."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return argmin(lambda state: (lmetric(query, state), query.new_on(state.rank)), query, candidates, tie_breaks)
