# SPDX-License-Identifier: Apache-2.0
"""A request's history, as its rank remembers it: what it found elsewhere, what was expected, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from banyan.core import MAX_RID_CHARS, SourceKind
from banyan.decoding import printable
from banyan.telemetry import Why, rid_pseudonym

WHY = {
    Why.SHORT.value: "held elsewhere, too few to move (--banyan-min-fetch-tokens)",
    Why.CHEAPER.value: "held elsewhere, computed sooner than moved",
    Why.REFUSED.value: "held elsewhere, and gone by the time, or without room",
    Why.GONE.value: "asked for before, held by nobody any more",
    Why.NEW.value: "never asked for before",
    Why.ABSENT.value: "held by nobody",
    Why.TAIL.value: "at the end: less than a page, or the last token and the page before it",
}


class ToldPlan(msgspec.Struct, kw_only=True):
    """A decision as this release's ranks tell it (``banyan.planner.planner``)."""

    rid: str
    prompt_tokens: int
    own_tokens: int
    dp_origin_kv_len: int
    dp_max_kv_len: int
    dp_max_kv_rank: int
    page_tokens: int
    found: list[list[str | int]]
    moved_pages: int
    reason: str
    outcome: str
    computed: dict[str, int]
    steps: list[list[str | float]]
    expected_us: int | None
    expected_move_us: int | None
    expected_compute_us: int | None
    error_us: int | None
    recompute_us: int | None
    planned_s: float = 0.0


def decisions_of(rid: str, nonce: str, plans: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The decisions of a rank about the request ``rid``, under that name: the rank tells its pseudonym, which may be
    asked for as well."""
    names = (rid, rid_pseudonym(nonce, rid[:MAX_RID_CHARS]))
    return [{**plan, "rid": rid} for plan in plans if plan["rid"] in names]


def as_told(plan: Any) -> dict[str, Any] | None:
    """A decision's fields that this release knows; None where it cannot be said: ranks of another one may have others,
    and a hostile server any."""
    try:
        told = msgspec.structs.asdict(msgspec.convert(plan, ToldPlan))
        sentences({"dp_rank": 0, **told})
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    return told


def sentences(plan: Mapping[str, Any]) -> list[str]:
    """One decision in words, with its figures."""
    tail = plan["prompt_tokens"] - plan["own_tokens"]
    found = _runs(plan["found"], plan["page_tokens"])
    moved = plan["moved_pages"] * plan["page_tokens"]
    lines = [
        f"{plan['rid']} on rank {plan['dp_rank']}: prompt of {plan['prompt_tokens']} tokens, "
        f"{plan['own_tokens']} in the rank's own tree, tail of {tail}",
        f"  found elsewhere: {found}",
        *_path(plan),
        f"  dp_origin_kv_len {plan['dp_origin_kv_len']}, dp_max_kv_len {plan['dp_max_kv_len']}, "
        f"dp_max_kv_rank {plan['dp_max_kv_rank']}",
        f"  plan: move {moved} tokens, compute {tail - moved}; {plan['reason']}; {plan['outcome']}",
    ]
    if plan["expected_us"] is not None:
        lines.append(
            f"  best move: {_ms(plan['expected_us'])} expected ({_ms(plan['expected_move_us'])} to move, "
            f"{_ms(plan['expected_compute_us'])} to compute, overlapping), error {_ms(plan['error_us'])}"
        )
    if plan["recompute_us"] is not None:
        lines.append(f"  recompute: {_ms(plan['recompute_us'])} expected")
    if plan["computed"]:
        lines.append("  computed: " + ", ".join(f"{tokens} {WHY[why]}" for why, tokens in plan["computed"].items()))
    if plan["steps"]:
        lines.append("  " + ", ".join(f"{what} after {_ms(after_s * 1e6)}" for what, after_s in plan["steps"]))
    return [printable(line) for line in lines]


def _path(plan: Mapping[str, Any]) -> list[str]:
    """Who has brought what was not in a pool: this node, from its store or its arena, another one, or both."""
    page_tokens, at = plan["page_tokens"], plan["own_tokens"]
    path, is_from_here = "", False
    for kind, num_pages, *origin in plan["found"]:
        if kind == SourceKind.REMOTE.value:
            path = f"split at {at} tokens, behind them through {origin[0]}" if is_from_here else f"through {origin[0]}"
            break
        is_from_here |= kind in (SourceKind.STORE.value, SourceKind.HOST.value)
        if kind == SourceKind.STORE.value:
            path = "own store"
        at += num_pages * page_tokens
    return [f"  path: {path}"] if path else []


def _runs(found: Sequence[Sequence[Any]], page_tokens: int) -> str:
    words = [f"{num_pages * page_tokens} tokens at {' '.join((kind, *origin))}" for kind, num_pages, *origin in found]
    return ", ".join(words) or "nothing"


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.2f} ms"
