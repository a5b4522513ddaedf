# SPDX-License-Identifier: Apache-2.0
"""What every policy sees and what it answers. All policies see the same; each uses what it needs.

A policy keeps nothing between calls: what it must know of the past (how many requests came before, which rank the
session was on) is part of the query, so that the engine's dispatcher, the router and the simulator drive the same
code. These are made anew for every request and rank: msgspec's structs take a tenth of the time of frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class RankState(msgspec.Struct, frozen=True):
    """One rank as the caller knows it: its last load snapshot plus what was sent to it since.

    Attributes:
        rank: names the rank in queries and answers. Policies compare it with nothing: a low number is no advantage.
        num_running: requests in the decode batch.
        num_waiting: requests that have not been prefilled.
        pending_prefill_tokens: prompt tokens of waiting requests that no cache of the rank holds.
        ongoing_tokens: tokens of all requests that are not finished, cached or not.
        read_queue_tokens: tokens whose KV waits to be read from storage: by the rank, or by a whole server; in the
            simulator on the rank's node.
        unused_tokens: room in the rank's pool that holds no page; None where it is not known, or where what leaves the
            pool is not lost.
        last_turn: the turn of the last request that was placed there; -1 before the first.
        prefill_tokens_per_s: what the rank has measured of itself; None before its first prefill.
    """

    rank: int
    num_running: int = 0
    num_waiting: int = 0
    pending_prefill_tokens: int = 0
    ongoing_tokens: int = 0
    read_queue_tokens: int = 0
    unused_tokens: int | None = None
    last_turn: int = -1
    prefill_tokens_per_s: float | None = None

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting


class Query(msgspec.Struct, frozen=True):
    """One request that wants a rank.

    Attributes:
        turn: how many requests the caller has placed before.
        num_prompt_tokens: length of the prompt.
        cached_tokens: rank -> leading tokens of the prompt in that rank's own cache; a missing rank holds none.
        fetchable_tokens: leading tokens that any rank can fetch from its peers; 0 when nothing is shared.
        out_of_reach: ranks that can fetch none of them.
        session_rank: where the session's last request went; None for the first one, or without a session.
    """

    turn: int
    num_prompt_tokens: int
    cached_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)
    fetchable_tokens: int = 0
    session_rank: int | None = None
    out_of_reach: frozenset[int] = frozenset()

    def cached_on(self, rank: int) -> int:
        return self.cached_tokens.get(rank, 0)

    def new_on(self, rank: int) -> int:
        """Tokens that the rank must compute, or fetch."""
        return self.num_prompt_tokens - self.cached_on(rank)

    def computed_on(self, rank: int) -> int:
        """Tokens that the rank must compute when it fetches whatever it can."""
        return self.num_prompt_tokens - max(self.cached_on(rank), self.fetchable_on(rank))

    def fetchable_on(self, rank: int) -> int:
        """Leading tokens that the rank can fetch from its peers."""
        return 0 if rank in self.out_of_reach else self.fetchable_tokens


class Reason(StrEnum):
    """Why a rank was chosen, in the words of the metrics."""

    TURN = "turn"
    """It was its turn."""
    SESSION = "session"
    """The session's last request went there."""
    CACHE = "cache"
    """No other candidate holds a longer prefix of the prompt."""
    LOAD = "load"
    """It has the lowest cost, though another candidate holds a longer prefix or nobody holds any."""
    SHORT_QUEUE = "short_queue"
    """Its node's storage reads are about to run dry."""
    LONG_QUEUE = "long_queue"
    """No rank below the token ceiling has a short read queue."""
    ALL_OVER = "all_over"
    """Every candidate is above the token ceiling; a caller that can hold requests back should."""


class Choice(msgspec.Struct, frozen=True):
    """A placement. ``hot_ranks`` were left out by the hot-rank guard."""

    rank: int
    reason: Reason
    hot_ranks: tuple[int, ...] = ()


TieBreaks = Callable[[int, int], int]
"""Decides what nothing else decides: of a turn and a rank the tie-break. The lowest wins; equal arguments,
equal tie-breaks."""


class Policy(Protocol):
    """Chooses among candidates. Pure: equal arguments, equal answers, in whatever order the candidates come."""

    def choose(self, query: Query, candidates: Sequence[RankState], tie_breaks: TieBreaks) -> Choice:
        """One of the candidates, of which there is at least one; none of them is hot."""
