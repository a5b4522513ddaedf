# SPDX-License-Identifier: Apache-2.0
"""Affinity: the rank that has the least of the prompt to compute, however busy it is; among equals, the idlest.

What affinity does alone, as a yardstick for policies that weigh load against it. One hot prefix draws all its requests
to one rank, unless the hot-rank guard steps in. Where ranks fetch from each other, what one of them holds none has to
compute, and load decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.cost import argmin
from banyan.routing.view import Choice, Query, RankState, TieBreaks


@dataclass(frozen=True, slots=True)
class Affinity:
    """The fewest tokens to compute; then the fewest ongoing."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return argmin(
            lambda state: (query.computed_on(state.rank), state.ongoing_tokens), query, candidates, tie_breaks
        )
