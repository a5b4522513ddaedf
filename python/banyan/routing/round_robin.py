# SPDX-License-Identifier: Apache-2.0
"""Round robin: blind to caches and to load. The baseline, and what stock SGLang does by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import cheapest
from banyan.routing.view import Choice, Query, RankState, Reason, TieBreaks


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The candidate whose last request is the longest ago.

    With the same candidates every time this is the familiar circle. It stays fair when some are hot now and then,
    where a counter over a changing list would skip and repeat.
    """

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return Choice(cheapest(lambda state: state.last_turn, query, candidates, tie_breaks).rank, Reason.TURN)
