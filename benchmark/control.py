# SPDX-License-Identifier: Apache-2.0
"""What Banyan costs the scheduler thread of each rank, as the server itself counts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.engine import Engine


def control_costs(url: str) -> list[dict[str, Any]]:
    """Per rank that shares: its control and forward time since the start; empty for a server that does not.

    Raises EngineError when the server does not answer.
    """
    return costs_in(Engine(url).server_info())


def costs_in(server_info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same, from an answer of `/server_info`. Ranks that ran no forward pass are left out."""
    ranks = [state["banyan"] for state in server_info.get("internal_states", ()) if "banyan" in state]
    return [
        {
            "dp_rank": rank["dp_rank"],
            "control_us": rank["control_us"],
            "forward_us": rank["forward_us"],
            "control_share": rank["control_us"] / rank["forward_us"],
        }
        for rank in ranks
        if rank["forward_us"]
    ]
