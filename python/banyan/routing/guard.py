# SPDX-License-Identifier: Apache-2.0
"""The hot-rank guard, common to all policies: whatever a policy prefers, it does not pile more onto an outlier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.view import Query, RankState

TIMES_COMPUTED = 4
"""What a token that has to be computed weighs against one that is ongoing. In the simulator more changes nothing for
chats and for agents, and lets a hot prefix heat its rank; 0 sent every chat away from a rank that was merely busy."""


@dataclass(frozen=True, slots=True)
class HotRankGuard:
    """A rank is hot when its ongoing tokens exceed ``factor`` times the mean of the others, plus one such prompt.

    The factor of 2 is that of the overload override in "Elastic P2P vs PD-Combined" (2.4). There it is taken of the
    mean over all ranks, which a rank of two can never exceed twice; hence the others. The prompt is added because
    it is the most that a move can save: below that difference, staying is not slower than computing anew elsewhere.
    It is counted in whole pages, as a rank counts what is ongoing: one whose answer has just ended is not hot for the
    same prompt. What every other rank would have to compute anew is added ``TIMES_COMPUTED`` times: ongoing tokens are
    mostly there already, and a move would spend more than it saves.
    """

    factor: float = 2.0
    page_tokens: int = 16
    """Banyan's page, for callers that do not know the server's."""

    def cool(self, query: Query, ranks: Sequence[RankState]) -> Sequence[RankState]:
        """The ranks that are not hot, of which there always is one."""
        if len(ranks) < 2 or math.isinf(self.factor):
            return ranks
        total = sum(state.ongoing_tokens for state in ranks)
        per_other = self.factor / (len(ranks) - 1)
        prompt = -(-query.num_prompt_tokens // self.page_tokens) * self.page_tokens
        computed = [query.computed_on(state.rank) for state in ranks]
        least, next_least = sorted(computed)[:2]

        def bound(state: RankState, own: int) -> float:
            anew = next_least - least if own == least else 0
            return (total - state.ongoing_tokens) * per_other + prompt + TIMES_COMPUTED * anew

        cool = [state for state, own in zip(ranks, computed, strict=True) if state.ongoing_tokens <= bound(state, own)]
        # The least loaded one is, but for how floats are rounded.
        return cool or ranks
