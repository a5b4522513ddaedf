# SPDX-License-Identifier: Apache-2.0
"""``banyan explain``: why a request got what it got, from what its rank remembers of it; or why pages were dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.cli.engine import Engine, EngineError
from banyan.decoding import printable
from banyan.observe.request_history import decisions_of, sentences

__all__ = ["DROPPED", "decisions", "drop_sentence", "drops", "sentences"]

TIMEOUT_S = 15.0
"""All ranks have to answer; one that stands still never does."""

ALL, DROPPED = "all", "dropped"
"""In place of a request's id."""


def decisions(engine: Engine, rid: str) -> list[dict[str, Any]]:
    """What the ranks decided for a request, or for all that they remember when ``rid`` is "all".

    Raises:
        EngineError: when no rank remembers the request.
    """
    found = [
        {"dp_rank": rank, **plan}
        for rank, state in engine.ranks().items()
        for plan in (state["plans"] if rid == ALL else decisions_of(rid, state["rid_nonce"], state["plans"]))
    ]
    if not found and rid != ALL:
        raise EngineError(
            f"no rank remembers {rid}: it was not looked up (its whole prompt was cached, or is shorter than a page), "
            "or too many others followed it"
        )
    return found


def drops(engine: Engine) -> list[dict[str, Any]]:
    """The last leaves that have left each rank's tree, the latest first."""
    return [{"dp_rank": rank, **one} for rank, state in engine.ranks().items() for one in state["dropped"]]


def drop_sentence(one: Mapping[str, Any]) -> str:
    """One leaf in words."""
    why = "the last copy" if one["copy"] is None else f"a duplicate ({one['copy']} had it)"
    asked = "asked for again before" if one["again"] else "asked for once"
    when = f"rank {one['dp_rank']}, {one['ago_s']:.1f} s ago"
    return printable(f"{when}: {one['num_pages']} page(s) up to {one['key']}: {why}, {asked}")
