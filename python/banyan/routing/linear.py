# SPDX-License-Identifier: Apache-2.0
"""Linear: ongoing tokens minus alpha times cached tokens.

The score of "Elastic P2P vs PD-Combined" (3.4), without the session rule that it is combined with there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.displacement import displaced
from banyan.routing.view import Choice, Query, RankState, TieBreaks


@dataclass(frozen=True, slots=True)
class Linear:
    """``alpha``: ongoing tokens that one cached token outweighs."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha is at least 0, not {self.alpha}")

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        def cost(state: RankState) -> float:
            return state.ongoing_tokens + displaced(query, state) - self.alpha * query.cached_on(state.rank)

        return argmin(cost, query, candidates, tie_breaks)
