# SPDX-License-Identifier: Apache-2.0
"""A node under a closed loop of clients, in virtual time: trees, fetches, an arena, and Banyan's own policies.

Ranks prefill one request after the other. Computing a token takes ``TOKEN_S``, copying one ``FETCH_S``: SmolLM2 on
one core, and only their ratio matters to what is found. Decoding is left out. Leaves are chosen in Banyan's own walks;
what a system takes for the loss of a leaf is what sets it apart.

A request: issued -> placed (waiting) -> served -> done; then the next one is issued.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.core import SourceKind
from banyan.lab.sim.tree import Page, Tree, Victims
from banyan.planner.demand import Demand
from banyan.planner.victims import NEAR_LEAVES, Leaf, Looks, expected_loss
from banyan.routing import POLICIES, Query, RankState, place

PAGE_TOKENS = 16
TOKEN_S = 1 / 600
FETCH_S = TOKEN_S / 500

LRU, DUPLICATES_FIRST, LOSS, RANDOM, BELADY = "lru", "duplicates first", "loss", "random", "belady"
ALL_LEAVES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is compared. ``arena_pages`` are of the node."""

    num_ranks: int
    pool_pages: int
    policy: str = "lmetric"
    fetches: bool = True
    evicts: str = LRU
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
    ttft_s: list[float] = field(default_factory=list)
    distinct: list[float] = field(default_factory=list)

    @property
    def hits(self) -> float:
        return self.num_cached / self.num_tokens


@dataclass(slots=True)
class _Work:
    pages: Sequence[Page]
    issued_s: float
    num_new: int
    num_held: int = 0
    """Pages that it holds locked while it is served."""


def _key(page: Page) -> tuple[Page]:
    """What hashes as well as a page's key does."""
    return (page,)


class Node:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._holders: dict[Page, int] = {}
        self._arena: OrderedDict[Page, None] = OrderedDict()
        self._rng = random.Random(setting.seed)
        self._next_use: dict[Page, list[int]] = {}
        self._position = 0
        self._demands = [Demand(setting.pool_pages) for _ in range(setting.num_ranks)]
        self._trees = [self._tree(rank) for rank in range(setting.num_ranks)]
        self._queues: list[list[_Work]] = [[] for _ in self._trees]
        self._policy = POLICIES[setting.policy]()
        self._turn = 0
        self._last_turns = [-1] * setting.num_ranks
        self.outcome = Outcome()

    def play(self, prompts: Sequence[Sequence[Page]], num_measured: int) -> Outcome:
        """Ask all prompts, in this order; measure the last ``num_measured``."""
        self._remember_uses(prompts)
        events: list[tuple[float, int]] = []
        waiting = list(enumerate(prompts))[::-1]
        now_s = 0.0

        def issue() -> None:
            if waiting:
                self._position, pages = waiting.pop()
                if self._position == len(prompts) - num_measured:
                    self.outcome = Outcome()
                rank = self._place(pages, now_s)
                if len(self._queues[rank]) == 1:
                    heapq.heappush(events, (now_s + self._serve(rank, now_s), rank))

        for _ in range(self._setting.concurrency):
            issue()
        while events:
            now_s, rank = heapq.heappop(events)
            self._finish(rank)
            issue()
            if self._queues[rank] and all(busy != rank for _, busy in events):
                heapq.heappush(events, (now_s + self._serve(rank, now_s), rank))
        return self.outcome

    def _remember_uses(self, prompts: Sequence[Sequence[Page]]) -> None:
        for position in reversed(range(len(prompts))):
            for page in prompts[position]:
                self._next_use.setdefault(page, []).append(position)

    # ---- placement ---------------------------------------------------------------------------------------------

    def _place(self, pages: Sequence[Page], now_s: float) -> int:
        own = [self._match(rank, pages) for rank in range(len(self._trees))]
        fetchable = self._reach(pages, 0) if self._setting.fetches else 0
        num_tokens = len(pages) * PAGE_TOKENS
        query = Query(
            turn=self._turn,
            num_prompt_tokens=num_tokens,
            cached_tokens={rank: num * PAGE_TOKENS for rank, num in enumerate(own)},
            fetchable_tokens=fetchable * PAGE_TOKENS,
        )
        rank = place(self._policy, query, [self._state(rank) for rank in range(len(self._trees))]).rank
        self._last_turns[rank] = self._turn
        self._turn += 1
        num_new = num_tokens - max(own[rank], fetchable) * PAGE_TOKENS
        self._queues[rank].append(_Work(pages, now_s, num_new))
        if self._setting.evicts == LOSS:
            self._demands[rank].asked(list(map(_key, pages)))
        return rank

    def _match(self, rank: int, pages: Sequence[Page]) -> int:
        """What the rank holds, or is about to."""
        best = self._trees[rank].match(pages)
        for work in self._queues[rank]:
            same = 0
            for mine, theirs in zip(pages, work.pages, strict=False):
                if mine != theirs:
                    break
                same += 1
            best = max(best, same)
        return best

    def _state(self, rank: int) -> RankState:
        queue = self._queues[rank]
        return RankState(
            rank=rank,
            num_running=0,
            num_waiting=len(queue),
            pending_prefill_tokens=sum(work.num_new for work in queue),
            ongoing_tokens=sum(len(work.pages) for work in queue) * PAGE_TOKENS,
            last_turn=self._last_turns[rank],
            unused_tokens=self._trees[rank].num_free * PAGE_TOKENS if self._setting.counts_displaced else None,
        )

    # ---- service -----------------------------------------------------------------------------------------------

    def _reach(self, pages: Sequence[Page], start: int) -> int:
        """Leading pages that somebody holds from ``start`` on."""
        for number in range(start, len(pages)):
            if not self._holders.get(pages[number]) and pages[number] not in self._arena:
                return number
        return len(pages)

    def _serve(self, rank: int, now_s: float) -> float:
        tree, work, outcome = self._trees[rank], self._queues[rank][0], self.outcome
        pages = work.pages
        own = tree.match(pages)
        reached = self._reach(pages, own) if self._setting.fetches else own
        tree.lock(pages[:own])
        if own:
            tree.touch(pages[:own])
        work.num_held = tree.insert(pages, own)
        for page in pages[own : work.num_held]:
            self._holders[page] = self._holders.get(page, 0) | 1 << rank
        self._back_up(pages[: work.num_held])
        computed = (len(pages) - reached) * PAGE_TOKENS
        taken_s = computed * TOKEN_S + (reached - own) * PAGE_TOKENS * FETCH_S
        outcome.num_tokens += len(pages) * PAGE_TOKENS
        outcome.num_cached += reached * PAGE_TOKENS
        outcome.num_fetched += (reached - own) * PAGE_TOKENS
        outcome.ttft_s.append(now_s + taken_s - work.issued_s)
        outcome.distinct.append(self.distinct_share())
        return taken_s

    def _finish(self, rank: int) -> None:
        work = self._queues[rank].pop(0)
        self._trees[rank].unlock(work.pages[: work.num_held])

    def _back_up(self, pages: Sequence[Page]) -> None:
        for page in reversed(pages):
            if self._setting.arena_pages:
                self._arena[page] = None
                self._arena.move_to_end(page)
        while len(self._arena) > self._setting.arena_pages:
            self._arena.popitem(last=False)

    # ---- eviction ----------------------------------------------------------------------------------------------

    def _tree(self, rank: int) -> Tree:
        def gone(page: Page) -> None:
            self.outcome.num_evicted += 1
            self.outcome.num_evicted_last += self._copy_of(rank, page) is None
            self._holders[page] &= ~(1 << rank)

        return Tree(self._setting.pool_pages, victims=self._victims(rank), gone=gone)

    def _victims(self, rank: int) -> Victims:
        age, share = self._demands[rank].age, FETCH_S / TOKEN_S

        def looking(loss: Callable[[Page, SourceKind | None], float], near: int, looks: Looks | None = None) -> Victims:
            def look(page: Page) -> Leaf:
                copy = self._copy_of(rank, page)
                return Leaf(page, "", copy, loss(page, copy))

            return Victims(look, near, looks)

        def expected(page: Page, copy: SourceKind | None) -> float:
            return expected_loss(1.0 if copy is None else share, age(_key(page)))

        match self._setting.evicts:
            case "lru":
                return looking(lambda page, copy: 0.0, 1)
            case "duplicates first":
                return looking(lambda page, copy: float(copy is None), NEAR_LEAVES)
            case "loss":
                return looking(expected, NEAR_LEAVES, Looks())
            case "random":
                return looking(lambda page, copy: self._rng.random(), ALL_LEAVES)
            case "belady":
                return looking(lambda page, copy: -self._wanted_at(page), ALL_LEAVES)
            case other:
                raise ValueError(f"nobody evicts by {other}")

    def _copy_of(self, rank: int, page: Page) -> SourceKind | None:
        if self._holders.get(page, 0) & ~(1 << rank):
            return SourceKind.PEER
        return SourceKind.HOST if page in self._arena else None

    def _wanted_at(self, page: Page) -> int:
        """The next prompt that wants it, as far as it may not have been served yet."""
        served = self._position - self._setting.concurrency
        return next((use for use in reversed(self._next_use.get(page, ())) if use > served), 1 << 30)

    def distinct_share(self) -> float:
        """Distinct pages over all pages that the pools hold."""
        num_held = sum(len(tree) for tree in self._trees)
        return sum(1 for holders in self._holders.values() if holders) / num_held if num_held else 1.0
