# SPDX-License-Identifier: Apache-2.0
"""What a request does with its uncached tail: fetch, load or recompute, and where moving stops paying.

``Planner.decide`` compares measured times: ``MoveRates`` for each source, ``PrefillTimes`` for computing. The same
``PrefillTimes`` limit a forward to the compute quota. ``Profile`` is where they start from.
"""

from banyan.planner.move_rates import MoveRates
from banyan.planner.plan import Estimated, Plan, PlanReason, Pricing, Tail
from banyan.planner.planner import Action, Planner
from banyan.planner.prefill_cost import ForwardSample, Piece, PrefillCost, mean_relative_error
from banyan.planner.prefill_times import PrefillTimes
from banyan.planner.profile import BadProfile, Profile
from banyan.planner.request import RequestFacts

__all__ = [
    "Action",
    "BadProfile",
    "Estimated",
    "ForwardSample",
    "MoveRates",
    "Piece",
    "Plan",
    "PlanReason",
    "Planner",
    "PrefillCost",
    "PrefillTimes",
    "Pricing",
    "Profile",
    "RequestFacts",
    "Tail",
    "mean_relative_error",
]
