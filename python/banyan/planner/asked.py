# SPDX-License-Identifier: Apache-2.0
"""A request may ask for its plan, in SGLang's ``kv_hints``: to compare both actions on one running server."""

from __future__ import annotations

from collections.abc import Mapping

from banyan.planner.planner import Action

ACTION_TYPE = "banyan.plan"


def payload(action: Action) -> dict[str, str]:
    return {"action": action.value}


def from_payload(values: Mapping[str, object]) -> Action | None:
    """Read a payload that crossed a process border; None when it is not one of ours."""
    try:
        return Action(values.get("action"))
    except ValueError:
        return None
