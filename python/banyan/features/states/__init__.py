# SPDX-License-Identifier: Apache-2.0
"""Models that keep states (state space, linear attention): states beside full pages."""

from banyan.config import inherit
from banyan.feature import Asked, Parts

WITHOUT_GRAPHS = {"SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND": "1"}
"""Layers of Kimi's kind would else read their state within a captured piece of a prefill, where nobody waits for it."""


def launched(asked: Asked) -> None:
    if asked.config.shares and asked.device != "cpu":
        inherit(WITHOUT_GRAPHS)


PARTS = Parts(page="compatibility.md", launched=launched, rank="banyan.features.states.rank.kinds_of_states:register")
