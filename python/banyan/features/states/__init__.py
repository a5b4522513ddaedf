# SPDX-License-Identifier: Apache-2.0
"""Models that keep states (state space, linear attention): states beside full pages."""

from banyan.feature import Parts

PARTS = Parts(page="compatibility.md", rank="banyan.features.states.rank.kinds_of_states:register")
