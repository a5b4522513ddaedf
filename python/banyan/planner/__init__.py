# SPDX-License-Identifier: Apache-2.0
"""What a request does with its uncached tail: fetch, load or recompute, and where moving stops paying.

``Planner.decide`` compares measured times: ``MoveRates`` for each source, ``PrefillTimes`` for computing.
"""

from banyan.planner.move_rates import MoveRates
from banyan.planner.plan import Pricing, Tail
from banyan.planner.planner import Action, Planner
from banyan.planner.prefill_cost import ForwardSample, Piece, PrefillCost
from banyan.planner.prefill_times import PrefillTimes
from banyan.planner.request import RequestFacts

__all__ = [
    "Action",
    "ForwardSample",
    "MoveRates",
    "Piece",
    "Planner",
    "PrefillCost",
    "PrefillTimes",
    "Pricing",
    "RequestFacts",
    "Tail",
]
