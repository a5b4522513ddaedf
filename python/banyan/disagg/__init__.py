# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers: what each of the two does, and how a request is brought to both. Pure."""

from banyan.disagg.advance import Advance, Forwards, Pace, layers_of_regions
from banyan.disagg.answer_pages import Answers
from banyan.disagg.arrivals import Arrivals
from banyan.disagg.asked_rooms import AskedRooms
from banyan.disagg.orphans import Orphans
from banyan.disagg.others import Others
from banyan.disagg.pauses import Pauses
from banyan.disagg.roles import Role, environment, notes
from banyan.disagg.take_back import State, TakeBack, TakeBacks, can_take_back

__all__ = [
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
]
