# SPDX-License-Identifier: Apache-2.0
"""``banyan explain RID``: why a request got what it got, from what its rank remembers of it."""

from __future__ import annotations

from typing import Any

from banyan.cli.engine import Engine, EngineError
from banyan.observe.life import sentences

__all__ = ["decisions", "sentences"]


def decisions(engine: Engine, rid: str) -> list[dict[str, Any]]:
    """What the ranks decided for a request, or for all that they remember when ``rid`` is "all".

    Raises:
        EngineError: when no rank remembers the request.
    """
    found = [
        {"dp_rank": rank, **plan}
        for rank, state in engine.ranks().items()
        for plan in state["plans"]
        if rid in ("all", plan["rid"])
    ]
    if not found and rid != "all":
        raise EngineError(
            f"no rank remembers {rid}: it was not looked up (its whole prompt was cached, or is shorter than a page), "
            "or too many others followed it"
        )
    return found
