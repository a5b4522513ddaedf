# SPDX-License-Identifier: Apache-2.0
"""Why the tokens of a prompt were computed and not found: each for one reason, and together with those that were cached
they are the prompt."""

from __future__ import annotations

from enum import Enum


class Why(Enum):
    """Of a run of tokens that was computed. The values end the names of counters."""

    SHORT = "short"
    """Held elsewhere, and less than --banyan-min-fetch-tokens."""

    CHEAPER = "cheaper"
    """Held elsewhere, and expected to be computed sooner than moved; or its request asked for that."""

    REFUSED = "refused"
    """Held elsewhere when it was looked up, and not had: it had gone by then, failed, or found no room."""

    GONE = "gone"
    """Asked for before on this node, and held nowhere any more."""

    NEW = "new"
    """Never asked for on this node, as far as that is remembered."""

    ABSENT = "absent"
    """Held nowhere; this rank does not remember what was asked for: where it evicts by age."""

    TAIL = "tail"
    """At the end of the prompt: less than a page, the token that is always computed, and a page where that token would
    be computed alone."""


def why_computed(
    *,
    prompt_tokens: int,
    cached_tokens: int,
    cacheable_tokens: int,
    found_tokens: int,
    planned_tokens: int,
    unplanned: Why,
    asked_before_tokens: int | None,
) -> dict[Why, int]:
    """Tokens by reason, from the first that was not cached on.

    ``cacheable_tokens``: what a cache can supply at most. ``found_tokens``: of the prompt's beginning, what the node
    held when it was looked up; ``planned_tokens``: of that, what was to be had; ``unplanned``: why the rest was not.
    ``asked_before_tokens``: of its beginning, what prompts of before had too; None where that is not remembered.
    """
    unheld = Why.ABSENT if asked_before_tokens is None else Why.NEW
    ends = (
        (Why.REFUSED, min(planned_tokens, found_tokens)),
        (unplanned, found_tokens),
        (Why.GONE, asked_before_tokens or 0),
        (unheld, cacheable_tokens),
    )
    at, reasons = cached_tokens, dict[Why, int]()
    for why, end in ends:
        if at < (end := min(end, cacheable_tokens)):
            reasons[why] = reasons.get(why, 0) + end - at
            at = end
    if at < prompt_tokens:
        reasons[Why.TAIL] = reasons.get(Why.TAIL, 0) + prompt_tokens - at
    return reasons
