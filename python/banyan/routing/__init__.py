# SPDX-License-Identifier: Apache-2.0
"""Which rank: what policies see (``view``), the ``policies``, ``place``, which asks one of them, and ``Dispatcher``,
which keeps the books for it.

And the prefix hint, which carries what the dispatcher saw and decided to the rank.
"""

from banyan.routing.dispatcher import Dispatcher, Prompt
from banyan.routing.guard import HotRankGuard
from banyan.routing.hint import PrefixHint
from banyan.routing.load import LoadReport, report_of
from banyan.routing.place import NoActiveRank
from banyan.routing.policies import POLICIES
from banyan.routing.tie_breaks import SeededTieBreaks
from banyan.routing.view import Choice, Policy, Query, RankState, Reason, TieBreaks
from banyan.routing.wait import Wait

__all__ = [
    "POLICIES",
    "Choice",
    "Dispatcher",
    "HotRankGuard",
    "LoadReport",
    "NoActiveRank",
    "Policy",
    "PrefixHint",
    "Prompt",
    "Query",
    "RankState",
    "Reason",
    "SeededTieBreaks",
    "TieBreaks",
    "Wait",
    "report_of",
]
