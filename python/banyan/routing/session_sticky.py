# SPDX-License-Identifier: Apache-2.0
"""Session sticky: a session stays where it is until that rank is hot; a new one goes where the least is going on.

The rule of the PD-combined baseline in "Elastic P2P vs PD-Combined" (2.4). Its overload override is the hot-rank
guard: a hot rank is no candidate, so the session moves, and then stays where it moved to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import cheapest
from banyan.routing.view import Choice, Query, RankState, Reason, TieBreaks


@dataclass(frozen=True, slots=True)
class SessionSticky:
    """The session's rank, else the one with the fewest ongoing tokens."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        if any(state.rank == query.session_rank for state in candidates):
            assert query.session_rank is not None
            return Choice(query.session_rank, Reason.SESSION)
        idlest = cheapest(lambda state: state.ongoing_tokens, query, candidates, tie_breaks)
        return Choice(idlest.rank, Reason.LOAD)
