# SPDX-License-Identifier: Apache-2.0
"""Whether a request waits, before it is placed, for a prefix that a rank is computing.

Prompts that are computed side by side do not find each other's pages. While there is room that costs one computation.
In full pools it costs twice: the second copy pushes out what others will have to compute again. So a request waits
where that is more than what the rank has to compute first. Then it is placed like any other, and fetches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from banyan.routing.view import Query, RankState

LEAST_GAIN_TOKENS = 256
"""Fewer are computed sooner than the directory is asked again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Until ``rank`` holds ``num_tokens`` of the prompt, in ``expected_s`` by its own measure."""

    rank: int
    num_tokens: int
    expected_s: float


def short_of_room(num_prompt_tokens: int, state: RankState) -> int:
    """Tokens of a prompt of which the rank holds nothing that do not fit into what is unused, and not spoken for."""
    if state.unused_tokens is None:
        return 0
    return max(0, num_prompt_tokens - max(0, state.unused_tokens - state.pending_prefill_tokens))


def wait_for(
    query: Query, held: int, awaited: Mapping[int, int], chosen: RankState, ranks: Sequence[RankState]
) -> Wait | None:
    """The wait that pays; None: the request goes to ``chosen`` now.

    Args:
        held: leading tokens that ``chosen`` holds, what it is about to hold not counted.
        awaited: leading tokens that each rank is about to hold.
        ranks: that may be waited for.
    """
    candidates = [state for state in ranks if awaited.get(state.rank, 0) and state.prefill_tokens_per_s]
    if not candidates:
        return None
    best = max(candidates, key=lambda state: (awaited[state.rank], -state.pending_prefill_tokens))
    gain = awaited[best.rank] - max(held, query.fetchable_tokens)
    displaced = min(gain, short_of_room(query.num_prompt_tokens - held, chosen))
    if gain < LEAST_GAIN_TOKENS or displaced <= 0:
        return None
    if best.pending_prefill_tokens > gain + displaced + chosen.pending_prefill_tokens:
        return None
    assert best.prefill_tokens_per_s is not None
    return Wait(best.rank, awaited[best.rank], best.pending_prefill_tokens / best.prefill_tokens_per_s)
