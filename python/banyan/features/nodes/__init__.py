# SPDX-License-Identifier: Apache-2.0
"""Pages between nodes: the door that lends a node's arena frames, and what borrows from other nodes' doors."""

from banyan.feature import Parts
from banyan.features.nodes.refused import refusals

PARTS = Parts(
    page="network.md",
    flags=("listen", "peers", "in_flight_kb"),
    counters=(
        "errands",
        "errands_failed",
        "errands_sent",
        "lent_bytes",
        "lent_pages",
        "loans_refused",
        "pull_bytes",
        "pull_failed_pages",
        "pull_pages",
        "pull_us",
        "pulls",
        "pulls_dropped_pages",
        "questions_directed",
        "questions_spared",
    ),
    refusals=refusals,
    rank="banyan.features.nodes.rank.read_elsewhere:register",
)
