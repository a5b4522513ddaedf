# SPDX-License-Identifier: Apache-2.0
"""Pages between nodes: the page server that lends a node's arena frames, and what borrows from other nodes' page
servers."""

from banyan.feature import Parts
from banyan.features.nodes.refused import refusals

PARTS = Parts(
    page="network.md",
    flags=("listen", "peers", "in_flight_kb", "carrier"),
    refusals=refusals,
    rank="banyan.features.nodes.rank.read_elsewhere:register",
)
