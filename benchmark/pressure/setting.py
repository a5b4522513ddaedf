# SPDX-License-Identifier: Apache-2.0
"""What the model of a node is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

LRU, DUPLICATES_FIRST, LOSS, RANDOM, BELADY = "lru", "duplicates first", "loss", "random", "belady"
LOSS_BY_AGE = "loss by age"
"""As ``LOSS``, with a page's age for its chance: nothing is learnt."""
BY_LOSS = (LOSS, LOSS_BY_AGE)
ROUTER = "router"
"""Not one of Banyan's policies: SGLang's router, ``cache_aware``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is compared. ``arena_pages`` are of the node. ``splits``: long nodes of the tree are split; ``waits``: the
    dispatcher holds requests back for what a rank is computing; ``hears``: ranks hear what others were asked for."""

    num_ranks: int
    pool_pages: int
    policy: str = "lmetric"
    fetches: bool = True
    evicts: str = LRU
    splits: bool = False
    waits: bool = False
    hears: bool = False
    arena_pages: int = 0
    counts_displaced: bool = False
    concurrency: int = 4
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """Of the requests that were measured."""

    num_tokens: int = 0
    num_cached: int = 0
    num_fetched: int = 0
    num_evicted_last: int = 0
    num_evicted: int = 0
    num_held_back: int = 0
    ttft_s: list[float] = field(default_factory=list)
    distinct: list[float] = field(default_factory=list)
    spare: list[float] = field(default_factory=list)

    @property
    def hits(self) -> float:
        return self.num_cached / self.num_tokens
