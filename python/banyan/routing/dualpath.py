# SPDX-License-Identifier: Apache-2.0
"""DualPath: keep every node's storage reads busy, below a ceiling of tokens.

After "DualPath" (arXiv 2602.21548), adaptive request scheduler: prefill ranks fall into three classes. Which side reads
is decided in ``reads``; what the source does on the decode side is in the simulator only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import cheapest
from banyan.routing.view import Choice, Query, RankState, Reason, TieBreaks


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPath:
    """The prefill side.

    Attributes:
        beta_tokens: above so many ongoing tokens a rank is overloaded.
        alpha_tokens: up to so many tokens a node's read queue is short, and its storage NIC about to idle.

    The source gives no values for the two; these fit prompts of some ten thousand tokens.
    """

    beta_tokens: int = 200_000
    alpha_tokens: int = 50_000

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        below = [state for state in candidates if state.ongoing_tokens <= self.beta_tokens]
        short = [state for state in below if state.read_queue_tokens <= self.alpha_tokens]
        if short:
            ranks, reason = short, Reason.SHORT_QUEUE
        elif below:
            ranks, reason = below, Reason.LONG_QUEUE
        else:
            ranks, reason = list(candidates), Reason.ALL_OVER
        return Choice(cheapest(lambda state: state.ongoing_tokens, query, ranks, tie_breaks).rank, reason)
