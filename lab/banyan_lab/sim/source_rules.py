# SPDX-License-Identifier: Apache-2.0
"""Four decisions after "DualPath" (arXiv 2602.21548) that no server takes, for the figures that its authors published.

In servers there are no groups of ranks, every request is placed when it comes, the router's ordinary policy chooses the
decode rank, and a read is divided between both sides (``banyan.routing.reads``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banyan.routing import Choice, Query, RankState, Reason, TieBreaks
from banyan.routing.policies import DualPath


class DecodeState(RankState, frozen=True):
    """A decode rank, or a group of them. ``free_tokens``: room in its pool, evictable pages included."""

    free_tokens: int = 0


def group_policy(policy: DualPath, *, num_ranks: int, num_nodes: int) -> DualPath:
    """What picks the group that ``policy`` picks a rank of: the same with the thresholds of so many ranks and nodes."""
    return DualPath(beta_tokens=policy.beta_tokens * num_ranks, alpha_tokens=policy.alpha_tokens * num_nodes)


def is_held_back(choice: Choice) -> bool:
    """Whether a request waits instead of going to the rank that was chosen: all have as much to do as they may."""
    return choice.reason is Reason.ALL_OVER


def is_read_by_decode(*, prefill_tokens: int, decode_tokens: int) -> bool:
    """Whether the decode side reads all of a request: the side with fewer tokens in its queue does. A tie goes to
    prefill, whose path is one transfer shorter."""
    return decode_tokens < prefill_tokens


def decode_rank(
    query: Query, groups: Mapping[int, Sequence[DecodeState]], num_tokens: int, tie_breaks: TieBreaks
) -> int:
    """The decode rank of a request that will hold ``num_tokens``: the group with the fewest ongoing tokens, then in it.

    In the group, a rank whose pool has room comes before one that must evict; then the fewest ongoing tokens.
    """
    totals = {group: sum(state.ongoing_tokens for state in ranks) for group, ranks in groups.items()}
    lowest = min(totals.values())
    tied = [group for group, total in totals.items() if total == lowest]
    group = tied[0]
    if len(tied) > 1:
        group = min(tied, key=lambda group: min(tie_breaks(query.turn, state.rank) for state in groups[group]))
    return min(
        groups[group],
        key=lambda state: (state.free_tokens < num_tokens, state.ongoing_tokens, tie_breaks(query.turn, state.rank)),
    ).rank
