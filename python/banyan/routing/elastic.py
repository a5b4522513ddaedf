# SPDX-License-Identifier: Apache-2.0
"""Elastic prefill: an idle rank computes a heavy prompt, and its session's rank fetches the KV and answers.

The answers that run on the session's rank are spared a long prefill between two of their tokens. The price is that the
prompt's KV moves, and that the idle rank is no longer idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.routing.view import Lots, Query, RankState


@dataclass(frozen=True, slots=True)
class Detour:
    """Compute the prompt on ``prefill_rank``, then answer on ``decode_rank``.

    ``expected_s`` is what the idle rank needs for the ``num_new_tokens`` that nobody holds, by its own measure.
    """

    prefill_rank: int
    decode_rank: int
    num_new_tokens: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class ElasticPrefill:
    """The gate. A prompt takes a detour when all of this holds:

    - at least ``min_new_tokens`` of it are held by nobody: the prefill is long, and what moves is cheap beside it;
    - its session's rank is active, not hot, and busy: there are answers to spare;
    - another rank has nothing to do at all, and has measured how fast it computes.

    "Elastic P2P vs PD-Combined" found detours neutral at best and forced ones harmful (chapter 3); hence no detour to a
    rank with any work, and none for prompts that nobody is spared by.
    """

    min_new_tokens: int

    def __post_init__(self) -> None:
        if self.min_new_tokens < 1:
            raise ValueError(f"elastic prefill begins at 1 new token or more, not {self.min_new_tokens}")

    def detour(self, query: Query, candidates: Sequence[RankState], lots: Lots) -> Detour | None:
        """The detour for this request; None when it runs where the policy says. ``candidates`` are active and cool."""
        home = next((state for state in candidates if state.rank == query.session_rank), None)
        num_new_tokens = query.num_prompt_tokens - max(query.fetchable_tokens, *query.cached_tokens.values(), 0)
        if home is None or home.num_requests == 0 or num_new_tokens < self.min_new_tokens:
            return None
        idle = [(lots(query.turn, state.rank), state) for state in candidates if state is not home and _is_idle(state)]
        if not idle:
            return None
        _, chosen = min(idle, key=lambda drawn: (-query.cached_on(drawn[1].rank), drawn[0]))
        assert chosen.prefill_tokens_per_s is not None
        return Detour(chosen.rank, home.rank, num_new_tokens, num_new_tokens / chosen.prefill_tokens_per_s)


def _is_idle(state: RankState) -> bool:
    return state.num_requests == 0 and state.prefill_tokens_per_s is not None
