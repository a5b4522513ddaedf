# SPDX-License-Identifier: Apache-2.0
"""The policies: each chooses one of the candidates, which ``place`` has picked.

Most minimise a cost (``argmin``). Their sources: "Elastic P2P vs PD-Combined" (P2P below), LMetric (OSDI 2026) and
"DualPath" (arXiv 2602.21548).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from banyan.routing.displacement import displaced
from banyan.routing.view import Choice, Policy, Query, RankState, Reason, TieBreaks

DEFAULT_CHUNK_TOKENS = 2048
"""For callers that do not know the server's: SGLang's 8192 on most GPUs, divided by four ranks."""


def cheapest(
    cost: Callable[[RankState], Any], query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks
) -> RankState:
    """The candidate of the lowest cost; of several, the one with the lowest tie-break. Costs are anything that
    compares."""
    costs = [cost(state) for state in candidates]
    lowest = min(costs)
    tied = [state for state, value in zip(candidates, costs, strict=True) if value == lowest]
    return tied[0] if len(tied) == 1 else min(tied, key=lambda state: tie_breaks(query.turn, state.rank))


def argmin(
    cost: Callable[[RankState], Any], query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks
) -> Choice:
    """``cheapest`` as a choice. The reason says whether the answer is also the best for the cache."""
    rank = cheapest(cost, query, candidates, tie_breaks).rank
    longest = max(query.cached_on(state.rank) for state in candidates)
    is_longest = query.cached_on(rank) == longest > 0
    return Choice(rank, Reason.CACHE if is_longest else Reason.LOAD)


class RoundRobin:
    """The candidate whose last request is the longest ago: blind to caches and to load, as stock SGLang is.

    With the same candidates every time this is the familiar circle. It stays fair when some are hot now and then,
    where a counter over a changing list would skip and repeat.
    """

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return Choice(cheapest(lambda state: state.last_turn, query, candidates, tie_breaks).rank, Reason.TURN)


class SessionSticky:
    """The session's rank, else the one with the fewest ongoing tokens.

    The rule of the PD-combined baseline in P2P (2.4). Its overload override is the hot-rank guard: a hot rank is no
    candidate, so the session moves, and then stays where it moved to.
    """

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        if any(state.rank == query.session_rank for state in candidates):
            assert query.session_rank is not None
            return Choice(query.session_rank, Reason.SESSION)
        idlest = cheapest(lambda state: state.ongoing_tokens, query, candidates, tie_breaks)
        return Choice(idlest.rank, Reason.LOAD)


class Affinity:
    """The fewest tokens to compute, however busy the rank is; then the fewest ongoing.

    What affinity does alone, as a yardstick for policies that weigh load against it. One hot prefix draws all its
    requests to one rank, unless the hot-rank guard steps in. Where ranks fetch from each other, what one of them holds
    none has to compute, and load decides.
    """

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return argmin(
            lambda state: (query.computed_on(state.rank), state.ongoing_tokens), query, candidates, tie_breaks
        )


class Linear:
    """Ongoing tokens minus cached tokens: P2P (3.4), without the session rule and the factor there."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        def cost(state: RankState) -> int:
            return state.ongoing_tokens + displaced(query, state) - query.cached_on(state.rank)

        return argmin(cost, query, candidates, tie_breaks)


def lmetric(query: Query, state: RankState) -> int:
    """(Pending prefill tokens + new tokens of this request) x requests: LMetric, as P2P (3.4, corrected) gives it.
    Lower is better.

    The new tokens make a soft affinity. Where ranks fetch from each other, what any of them can fetch is new on none:
    there a prefix decides between equally busy ranks only. What the request would push out of a full pool counts as
    work, for it will be. The request itself counts too: an idle rank would otherwise score 0 whatever it had to
    compute.
    """
    num_tokens = state.pending_prefill_tokens + query.computed_on(state.rank) + displaced(query, state)
    return num_tokens * (state.num_requests + 1)


class LMetric:
    """The rank with the lowest score; of several, the one with the least to fetch."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        return argmin(lambda state: (lmetric(query, state), query.new_on(state.rank)), query, candidates, tie_breaks)


class Hybrid:
    """Affinity where most of the prompt is cached, LMetric everywhere else: the last design of P2P (errata to 3.9).

    A rank that holds more than half of the prompt is preferred to all that do not.
    """

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        warm = [state for state in candidates if 2 * query.cached_on(state.rank) > query.num_prompt_tokens]

        def cost(state: RankState) -> tuple[int, int, int]:
            # LMetric alone ties whenever the prompt is wholly cached: then requests decide, then tokens.
            return lmetric(query, state), state.num_requests, state.ongoing_tokens

        return argmin(cost, query, warm or candidates, tie_breaks)


PREFILL_TOKENS_PER_S = 7_000.0
"""Of a rank that has not measured it: P2P (3.9)."""

FETCH_TOKENS_PER_S = 250_000.0
"""Copied from a peer: NVLink-free PCIe 4.0 x16 (25 GB/s) at 100 KB of KV per token."""

FETCH_OVERHEAD_S = 0.1
"""Of every fetch: P2P (3.9)."""

SESSION_FACTOR = 2.0
"""The session's rank is kept while it costs at most this much times the best."""


class Unified:
    """The rank with the lowest expected time to first token, be it by computing or by fetching from a peer: P2P (3.9),
    with a soft preference for the session's rank."""

    def expected_s(self, query: Query, state: RankState) -> float:
        """Queue + prefill + transfer, in seconds; whichever of computing and fetching the tail is faster. And what
        others will have to compute again."""
        rate = state.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
        own_s = query.new_on(state.rank) / rate
        fetchable = query.fetchable_on(state.rank)
        missing = fetchable - query.cached_on(state.rank)
        if missing > 0:
            fetch_s = FETCH_OVERHEAD_S + missing / FETCH_TOKENS_PER_S
            own_s = min(own_s, fetch_s + (query.num_prompt_tokens - fetchable) / rate)
        return (state.pending_prefill_tokens + displaced(query, state)) / rate + own_s

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        expected_s = {state.rank: self.expected_s(query, state) for state in candidates}
        own = query.session_rank
        if own in expected_s and expected_s[own] <= SESSION_FACTOR * min(expected_s.values()):
            return Choice(own, Reason.SESSION)
        # Requests break a tie: pending prefill says nothing of a rank that only decodes.
        return argmin(lambda state: (expected_s[state.rank], state.num_requests), query, candidates, tie_breaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPath:
    """DualPath's adaptive request scheduler, the prefill side: keep every node's storage reads busy, below a ceiling of
    tokens. Prefill ranks fall into three classes.

    Attributes:
        beta_tokens: above so many ongoing tokens a rank is overloaded.
        alpha_tokens: up to so many tokens a node's read queue is short, and its storage NIC about to idle.

    The source gives no values for the two; these fit prompts of some ten thousand tokens. Which side reads is decided
    in ``reads``; what the source does on the decode side is in the simulator only.
    """

    beta_tokens: int = 200_000
    alpha_tokens: int = 50_000

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        below = [state for state in candidates if state.ongoing_tokens <= self.beta_tokens]
        short = [state for state in below if state.read_queue_tokens <= self.alpha_tokens]
        if short:
            ranks, reason = short, Reason.SHORT_QUEUE
        elif below:
            ranks, reason = below, Reason.LONG_QUEUE
        else:
            ranks, reason = list(candidates), Reason.ALL_OVER
        return Choice(cheapest(lambda state: state.ongoing_tokens, query, ranks, tie_breaks).rank, reason)


@dataclass(frozen=True, slots=True)
class Level:
    """For ranks that step together: the lowest resulting maximum of pending prefill tokens, then the lowest queue, then
    the longest prefix.

    Under attention data parallelism a step takes as long as that of its fullest rank, so a placement costs what it adds
    to the maximum over all ranks. Any rank can fetch what another holds: a hit decides only between ranks that differ
    by less than ``chunk_tokens``, which is what a rank computes in one step.
    """

    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        filled = {state.rank: state.pending_prefill_tokens + query.computed_on(state.rank) for state in candidates}
        pending = sorted((state.pending_prefill_tokens for state in candidates), reverse=True)

        def resulting_maximum(state: RankState) -> int:
            """Pending tokens of the fullest rank, when the request goes to this one."""
            others = pending[1:2] if state.pending_prefill_tokens == pending[0] else pending[:1]
            return max(filled[state.rank], *others, 0)

        level = self._within_a_chunk(candidates, resulting_maximum)
        level = self._within_a_chunk(level, lambda state: filled[state.rank])
        return argmin(
            lambda state: (query.new_on(state.rank), filled[state.rank], state.num_requests), query, level, tie_breaks
        )

    def _within_a_chunk(self, states: Sequence[RankState], cost: Callable[[RankState], int]) -> list[RankState]:
        costs = [cost(state) for state in states]
        most = min(costs) + self.chunk_tokens
        return [state for state, tokens in zip(states, costs, strict=True) if tokens <= most]


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round_robin": RoundRobin,
        "session_sticky": SessionSticky,
        "affinity": Affinity,
        "linear": Linear,
        "lmetric": LMetric,
        "unified": Unified,
        "hybrid": Hybrid,
        "dualpath": DualPath,
        "level": Level,
    }
)
