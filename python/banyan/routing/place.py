# SPDX-License-Identifier: Apache-2.0
"""From the active ranks to one: without the hot ones, and then the policy."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from banyan.routing.guard import HotRankGuard
from banyan.routing.tie_breaks import SeededTieBreaks
from banyan.routing.view import Choice, Policy, Query, RankState, TieBreaks

DEFAULT_GUARD = HotRankGuard()
DEFAULT_TIE_BREAKS = SeededTieBreaks()


class NoActiveRank(LookupError):
    """There is nobody to send the request to."""


def place(
    policy: Policy,
    query: Query,
    ranks: Sequence[RankState],
    *,
    guard: HotRankGuard = DEFAULT_GUARD,
    tie_breaks: TieBreaks = DEFAULT_TIE_BREAKS,
) -> Choice:
    """Choose one of the active ranks.

    Raises:
        NoActiveRank: when there is none.
    """
    if not ranks:
        raise NoActiveRank("no rank is active")
    cool = guard.cool(query, ranks)
    choice = policy.choose(query, cool, tie_breaks)
    if len(cool) == len(ranks):
        return choice
    kept = {state.rank for state in cool}
    return replace(choice, hot_ranks=tuple(state.rank for state in ranks if state.rank not in kept))
