# SPDX-License-Identifier: Apache-2.0
"""Which rank: what policies see (``view``), the policies, one in each file, ``place``, which asks one of them, and
``Dispatcher``, which keeps the books for it.

And the prefix hint, which carries what the dispatcher saw and decided to the rank.
"""

from banyan.routing.dispatcher import Dispatcher, Prompt
from banyan.routing.guard import UNGUARDED, HotRankGuard
from banyan.routing.hint import PrefixHint
from banyan.routing.load import LoadReport, report_of
from banyan.routing.lots import SeededLots
from banyan.routing.place import POLICIES, NoActiveRank, place
from banyan.routing.view import Choice, Lots, Policy, Query, RankState, Reason
from banyan.routing.wait import Wait

__all__ = [
    "POLICIES",
    "UNGUARDED",
    "Choice",
    "Dispatcher",
    "HotRankGuard",
    "LoadReport",
    "Lots",
    "NoActiveRank",
    "Policy",
    "PrefixHint",
    "Prompt",
    "Query",
    "RankState",
    "Reason",
    "SeededLots",
    "Wait",
    "place",
    "report_of",
]
