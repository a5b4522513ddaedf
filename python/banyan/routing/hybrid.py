# SPDX-License-Identifier: Apache-2.0
"""Hybrid: affinity where most of the prompt is cached, LMetric everywhere else.

The last design of "Elastic P2P vs PD-Combined" (errata to 3.9), after forced migrations had made the tail worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.lmetric import lmetric
from banyan.routing.view import Choice, Query, RankState, TieBreaks


@dataclass(frozen=True, slots=True)
class Hybrid:
    """``min_cached_ratio``: a rank that holds more of the prompt than this is preferred to all that do not."""

    min_cached_ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.min_cached_ratio <= 1:
            raise ValueError(f"min_cached_ratio is between 0 and 1, not {self.min_cached_ratio}")

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        threshold = self.min_cached_ratio * query.num_prompt_tokens
        warm = [state for state in candidates if query.cached_on(state.rank) > threshold]

        def cost(state: RankState) -> tuple[int, int, int]:
            # LMetric alone ties whenever the prompt is wholly cached: then requests decide, then tokens.
            return lmetric(query, state), state.num_requests, state.ongoing_tokens

        return argmin(cost, query, warm or candidates, tie_breaks)
