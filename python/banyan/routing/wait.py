# SPDX-License-Identifier: Apache-2.0
"""Whether a request waits, before it is placed, for a prefix that a rank is computing.

Prompts that are computed side by side do not find each other's pages. So a request waits where it can fetch the prefix
sooner than it could compute it. In full pools a second copy also pushes out what others will have to compute again:
there it waits for longer, as long as that takes. Then it is placed like any other, and fetches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from banyan.routing.view import Query, RankState

LEAST_GAIN_TOKENS = 256
"""Fewer are computed sooner than the directory is asked again, and what is fetched is in place."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A rank is about to have ``num_tokens`` of the prompt, when it has computed ``tokens_until`` more."""

    num_tokens: int
    tokens_until: int


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
    query: Query, held: int, coming: Mapping[int, Coming], chosen: RankState, ranks: Sequence[RankState]
) -> Wait | None:
    """The wait that pays; None: the request goes to ``chosen`` now.

    Args:
        held: leading tokens that ``chosen`` holds, what it is about to hold not counted.
        coming: of ranks that are about to hold more of the prompt than can be fetched.
        ranks: that may be waited for.
    """
    candidates = [state for state in ranks if state.rank in coming and state.prefill_tokens_per_s]
    if not candidates:
        return None
    best = max(candidates, key=lambda state: (coming[state.rank].num_tokens, -coming[state.rank].tokens_until))
    pending = coming[best.rank]
    gain = pending.num_tokens - max(held, query.fetchable_on(chosen.rank))
    if gain < LEAST_GAIN_TOKENS:
        return None
    displaced = min(gain, short_of_room(query.num_prompt_tokens - held, chosen))
    if displaced <= 0 and best.rank == chosen.rank:
        # Behind the other in one queue, where it finds the prefix when its turn comes.
        return None
    worth = gain + displaced if displaced > 0 else gain - LEAST_GAIN_TOKENS
    if pending.tokens_until > worth + chosen.pending_prefill_tokens:
        return None
    assert best.prefill_tokens_per_s is not None
    return Wait(best.rank, pending.num_tokens, pending.tokens_until / best.prefill_tokens_per_s)
