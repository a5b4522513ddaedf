# SPDX-License-Identifier: Apache-2.0
"""A rank's next batch. By tokens is the engine's own chunked prefill; by quota is ``banyan.planner``'s prediction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from banyan.planner import PrefillCost
from banyan_lab.sim.compute import PrefillModel
from banyan_lab.sim.prefill import Piece, PrefillRank


def by_tokens(pass_tokens: int) -> Callable[[PrefillRank], list[Piece]]:
    """First come, first served, up to so many new tokens; the request that exceeds them is cut."""

    def select(rank: PrefillRank) -> list[Piece]:
        batch: list[Piece] = []
        left = pass_tokens
        while rank.ready and left > 0:
            turn = rank.ready[0]
            extend = min(turn.left_tokens, left)
            batch.append((turn, extend, turn.prompt_tokens - turn.left_tokens))
            left -= extend
            if extend < turn.left_tokens:
                break
            rank.ready.popleft()
        return batch

    return select


def attention_cost(prefill: PrefillModel) -> PrefillCost:
    """What the planner knows of the attention: a weight for tokens and one for pairs, in microseconds."""
    model, us_per_flop = prefill.model, 1e6 / prefill.flops_per_s
    if model.topk_tokens:
        token_us, pair_us = model.topk_tokens * model.pair_flops, model.index_pair_flops
    else:
        token_us, pair_us = 0.0, model.pair_flops
    return PrefillCost(fixed_us=0.0, token_us=token_us * us_per_flop, pair_us=pair_us * us_per_flop, context_us=0.0)


def largest_extend(cost: PrefillCost, prefix_tokens: int, budget_us: float, *, at_most: int) -> int:
    """The most new tokens behind ``prefix_tokens`` that add no more than ``budget_us``; 0 when one is too many."""
    return bisect_right(range(1, at_most + 1), budget_us, key=lambda extend: cost.piece_us(extend, prefix_tokens))


def by_quota(cost: PrefillCost, quota_us: float, pass_tokens: int) -> Callable[[PrefillRank], list[Piece]]:
    """First come, first served, while the predicted attention stays within the quota; the request beyond it is cut.

    The first request gets a token at least: a quota that is too small must not stop the rank.
    """

    def select(rank: PrefillRank) -> list[Piece]:
        batch: list[Piece] = []
        left, budget_us = pass_tokens, quota_us
        while rank.ready and left > 0:
            turn = rank.ready[0]
            prefix, extend = turn.prompt_tokens - turn.left_tokens, min(turn.left_tokens, left)
            needed_us = cost.piece_us(extend, prefix)
            if needed_us > budget_us:
                extend = largest_extend(cost, prefix, budget_us, at_most=extend)
                if extend == 0 and not batch:
                    extend = 1
                needed_us = budget_us
            if extend == 0:
                break
            batch.append((turn, extend, prefix))
            left -= extend
            budget_us -= needed_us
            if extend < turn.left_tokens:
                break
            rank.ready.popleft()
        return batch

    return select
