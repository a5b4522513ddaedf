# SPDX-License-Identifier: Apache-2.0
"""Two decisions of "DualPath" (arXiv 2602.21548) that no server takes, for the figures that its authors published.

In servers the router's ordinary policy chooses the decode rank, and a read is divided between both sides
(``banyan.routing.reads``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banyan.routing import Query, RankState, TieBreaks
from banyan.routing.policies import cheapest


class DecodeState(RankState, frozen=True):
    """A decode rank, or a group of them. ``free_tokens``: room in its pool, evictable pages included."""

    free_tokens: int = 0


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
    return cheapest(
        lambda state: (state.free_tokens < num_tokens, state.ongoing_tokens), query, groups[group], tie_breaks
    ).rank
