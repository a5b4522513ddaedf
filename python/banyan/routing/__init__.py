# SPDX-License-Identifier: Apache-2.0
"""Which rank: what policies see (``view``), the policies, one in each file, and ``place``, which asks one of them.

And the prefix hint, which carries what the dispatcher saw to the rank.
"""

from banyan.routing.guard import UNGUARDED, HotRankGuard
from banyan.routing.hint import PrefixHint
from banyan.routing.lots import SeededLots
from banyan.routing.place import POLICIES, NoActiveRank, place
from banyan.routing.view import Choice, Lots, Policy, Query, RankState, Reason

__all__ = [
    "POLICIES",
    "UNGUARDED",
    "Choice",
    "HotRankGuard",
    "Lots",
    "NoActiveRank",
    "Policy",
    "PrefixHint",
    "Query",
    "RankState",
    "Reason",
    "SeededLots",
    "place",
]
