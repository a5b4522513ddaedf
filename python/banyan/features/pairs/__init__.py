# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers: what each of the two does, and how a request is brought to both."""

from banyan.feature import Parts
from banyan.features.pairs.advance import Advance, Forwards, Pace, layers_of_regions
from banyan.features.pairs.answer_pages import Answers
from banyan.features.pairs.arrivals import Arrivals
from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.features.pairs.launched import launched
from banyan.features.pairs.orphans import Orphans
from banyan.features.pairs.others import Others
from banyan.features.pairs.pauses import Pauses
from banyan.features.pairs.roles import Role, environment, notes, weights_refusal
from banyan.features.pairs.take_back import State, TakeBack, TakeBacks, can_take_back

PARTS = Parts(
    page="pd.md",
    flags=("ib_service_level",),
    launched=launched,
    rank="banyan.features.pairs.rank.at_rank:register",
)

__all__ = [
    "PARTS",
    "Advance",
    "Answers",
    "Arrivals",
    "AskedRooms",
    "Forwards",
    "Orphans",
    "Others",
    "Pace",
    "Pauses",
    "Role",
    "State",
    "TakeBack",
    "TakeBacks",
    "can_take_back",
    "environment",
    "layers_of_regions",
    "notes",
    "weights_refusal",
]
