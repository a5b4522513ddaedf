# SPDX-License-Identifier: Apache-2.0
"""Models that keep states (state space, linear attention): states beside full pages."""

from banyan.feature import Parts
from banyan.features.states.kept_states import refusals

PARTS = Parts(page="compatibility.md", refusals=refusals, rank="banyan.features.states.rank.kinds_of_states:register")
