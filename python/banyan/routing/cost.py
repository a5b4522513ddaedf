# SPDX-License-Identifier: Apache-2.0
"""What the policies that minimise something have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from banyan.routing.view import Choice, Query, RankState, Reason, TieBreaks


def cheapest(
    cost: Callable[[RankState], Any], query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks
) -> RankState:
    """The candidate of the lowest cost; of several, the one with the lowest tie-break. Costs are anything that
    compares."""
    costs = [cost(state) for state in candidates]
    lowest = min(costs)
    tied = [state for state, value in zip(candidates, costs, strict=True) if value == lowest]
    return tied[0] if len(tied) == 1 else min(tied, key=lambda state: tie_breaks(query.turn, state.rank))


def argmin(
    cost: Callable[[RankState], Any], query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks
) -> Choice:
    """``cheapest`` as a choice. The reason says whether the answer is also the best for the cache."""
    rank = cheapest(cost, query, candidates, tie_breaks).rank
    longest = max(query.cached_on(state.rank) for state in candidates)
    is_longest = query.cached_on(rank) == longest > 0
    return Choice(rank, Reason.CACHE if is_longest else Reason.LOAD)
