# SPDX-License-Identifier: Apache-2.0
"""From all ranks to one: the active ones, without the hot ones, and then the policy. And the policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from banyan.routing.affinity import Affinity
from banyan.routing.dualpath import DualPath
from banyan.routing.guard import HotRankGuard
from banyan.routing.hybrid import Hybrid
from banyan.routing.level import Level
from banyan.routing.linear import Linear
from banyan.routing.lmetric import LMetric
from banyan.routing.round_robin import RoundRobin
from banyan.routing.session_sticky import SessionSticky
from banyan.routing.tie_breaks import SeededTieBreaks
from banyan.routing.unified import Unified
from banyan.routing.view import Choice, Policy, Query, RankState, TieBreaks

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "session_sticky": SessionSticky,
        "affinity": Affinity,
        "linear": Linear,
        "lmetric": LMetric,
        "unified": Unified,
        "hybrid": Hybrid,
        "dualpath": DualPath,
        "level": Level,
    }
)

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
        NoActiveRank: when none is active.
    """
    active = [state for state in ranks if state.is_active]
    if not active:
        raise NoActiveRank(f"none of {len(ranks)} ranks is active")
    cool = guard.cool(query, active)
    choice = policy.choose(query, cool, tie_breaks)
    if len(cool) == len(active):
        return choice
    kept = {state.rank for state in cool}
    return replace(choice, hot_ranks=tuple(state.rank for state in active if state.rank not in kept))
