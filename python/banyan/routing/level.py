# SPDX-License-Identifier: Apache-2.0
"""Level: the rank that leaves the fullest one least full. For ranks that step together.

Under attention data parallelism a step takes as long as that of its fullest rank, so a placement costs what it adds to
the maximum over all ranks, not to one rank's queue. Any rank can fetch what another holds: a hit decides only between
ranks that are equally good within one chunk, which is what a rank computes in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.view import Choice, Query, RankState, TieBreaks

DEFAULT_CHUNK_TOKENS = 2048
"""For callers that do not know the server's: SGLang's 8192 on most GPUs, divided by four ranks."""


@dataclass(frozen=True, slots=True)
class Level:
    """The lowest resulting maximum of pending prefill tokens, then the lowest queue, then the longest prefix.

    ``chunk_tokens`` is how far two ranks may differ in the first two and count as equal.
    """

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"a chunk has 1 token or more, not {self.chunk_tokens}")

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        filled = {state.rank: state.pending_prefill_tokens + query.computed_on(state.rank) for state in candidates}
        level = self._within_a_chunk(candidates, lambda state: _resulting_maximum(state, candidates, filled))
        level = self._within_a_chunk(level, lambda state: filled[state.rank])
        return argmin(
            lambda state: (query.new_on(state.rank), filled[state.rank], state.num_requests), query, level, tie_breaks
        )

    def _within_a_chunk(self, states: Sequence[RankState], cost: Callable[[RankState], int]) -> list[RankState]:
        costs = [cost(state) for state in states]
        most = min(costs) + self.chunk_tokens
        return [state for state, tokens in zip(states, costs, strict=True) if tokens <= most]


def _resulting_maximum(placed: RankState, states: Sequence[RankState], filled: dict[int, int]) -> int:
    """Pending tokens of the fullest rank, when the request goes to ``placed``."""
    others = (state.pending_prefill_tokens for state in states if state.rank != placed.rank)
    return max(filled[placed.rank], *others, 0)
