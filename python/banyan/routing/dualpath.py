# SPDX-License-Identifier: Apache-2.0
"""DualPath: keep every node's storage reads busy, below a ceiling of tokens.

After "DualPath" (arXiv 2602.21548), adaptive request scheduler: prefill ranks fall into three classes, and decode ranks
are balanced over groups first and within the group then. Which side reads is decided in ``reads``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from banyan.routing.cost import cheapest
from banyan.routing.view import Choice, Lots, Query, RankState, Reason


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

    def choose(self, query: Query, candidates: Sequence[RankState], lots: Lots) -> Choice:
        below = [state for state in candidates if state.ongoing_tokens <= self.beta_tokens]
        short = [state for state in below if state.read_queue_tokens <= self.alpha_tokens]
        if short:
            ranks, reason = short, Reason.SHORT_QUEUE
        elif below:
            ranks, reason = below, Reason.LONG_QUEUE
        else:
            ranks, reason = list(candidates), Reason.ALL_OVER
        return Choice(cheapest(lambda state: state.ongoing_tokens, query, ranks, lots).rank, reason)


def decode_rank(query: Query, groups: Mapping[int, Sequence[RankState]], num_tokens: int, lots: Lots) -> int:
    """The decode rank of a request that will hold ``num_tokens``: the group with the fewest ongoing tokens, then in it.

    In the group, a rank whose pool has room comes before one that must evict; then the fewest ongoing tokens. Groups
    without an active rank are passed over.

    Raises:
        ValueError: when no group has an active rank.
    """
    active = {group: [state for state in ranks if state.is_active] for group, ranks in groups.items()}
    totals = {group: sum(state.ongoing_tokens for state in ranks) for group, ranks in active.items() if ranks}
    if not totals:
        raise ValueError("no group has an active decode rank")
    lowest = min(totals.values())
    tied = [group for group, total in totals.items() if total == lowest]
    group = tied[0]
    if len(tied) > 1:
        group = min(tied, key=lambda group: min(lots(query.turn, state.rank) for state in active[group]))
    return cheapest(
        lambda state: (state.free_tokens < num_tokens, state.ongoing_tokens), query, active[group], lots
    ).rank
