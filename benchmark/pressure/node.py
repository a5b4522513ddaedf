# SPDX-License-Identifier: Apache-2.0
"""A node under a closed loop of clients, in virtual time: trees, batches, fetches, an arena, Banyan's own decisions.

What a prompt finds depends on when others are done, so ranks work as SGLang's do. Those that wait are prefilled side by
side, as many as fit into a chunk, and find nothing of each other; their pages are published when the batch has ended.
What they need is set aside before, and what is fetched with it. Their pages are locked until they have decoded. What a
prompt brings is one node of the tree, which goes as a whole. The last page of a prompt is always computed.

Computing a token takes ``TOKEN_S``, copying one ``FETCH_S``: SmolLM2 on one core, and only their ratio matters to what
is found. Leaves are chosen in Banyan's own walks; what a system takes for the loss of a leaf is what sets it apart.

A request: issued -> (held by the dispatcher) -> placed -> waiting -> in a batch -> decoding -> done; then the next one
is issued.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan._native import Demand
from banyan.core import SourceKind
from banyan.planner.victims import NEAR_LEAVES, Leaf, Looks
from banyan.routing import POLICIES, Dispatcher, LoadReport, Prompt, Wait
from banyan_lab.sim.caches import Arena
from banyan_lab.sim.prompts import PagedPrompt
from banyan_lab.sim.tree import Page, Tree, Victims, page_number, page_numbers
from benchmark.pressure.approximate import ApproximateTrees
from benchmark.pressure.copies import distinct_share, spare_share
from benchmark.pressure.setting import BY_LOSS, ROUTER, Outcome, Setting

PAGE_TOKENS = 16
ALL_LEAVES = 1 << 30
TOKEN_S = 1 / 600
FETCH_S = TOKEN_S / 500
CHUNK_PAGES = 256
"""SGLang's chunk of 4,096 tokens on a CPU."""

DECODE_STEPS, STEP_S, STEP_OF_REQUEST_S = 8, 0.04, 0.04
"""Of an answer; of a step, and more for each request in it."""

SPARE_EVERY = 8
"""Requests; it looks at every page."""

APART_S = 0.0005
"""Two requests of a client pool do not come at once: the first is often in a batch of its own."""


@dataclass(slots=True, eq=False)
class _Work:
    name: str
    pages: Sequence[Page]
    issued_s: float
    is_measured: bool
    num_new: int = 0
    """Tokens that the dispatcher expects to be computed."""
    num_done: int = 0
    num_in_batch: int = 0
    num_reserved: int = 0
    num_locked: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class _Rank:
    tree: Tree
    demand: Demand
    waiting: list[_Work] = field(default_factory=list)
    batch: list[_Work] = field(default_factory=list)
    chunked: _Work | None = None
    decoding: list[_Work] = field(default_factory=list)
    is_busy: bool = False
    computed_tokens: int = 0

    @property
    def prefilling(self) -> list[_Work]:
        return self.batch + self.waiting


class Node:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._holders: dict[Page, int] = {}
        self._arena = Arena(setting.arena_pages)
        self._rng = random.Random(setting.seed)
        self._next_use: dict[Page, list[int]] = {}
        self._position = self._first_measured = 0
        self._ranks: list[_Rank] = []
        for rank in range(setting.num_ranks):
            demand = Demand(setting.pool_pages * (setting.num_ranks if setting.hears else 1))
            self._ranks.append(_Rank(self._tree(rank, demand), demand))
        self._router = ApproximateTrees(setting.num_ranks)
        policy = "lmetric" if setting.policy == ROUTER else setting.policy
        self._dispatcher = Dispatcher(setting.num_ranks, POLICIES[policy]())
        self._held: list[tuple[_Work, Prompt, Wait]] = []
        self._waiting: list[tuple[int, Sequence[Page]]] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._num_events = 0
        self._now_s = 0.0
        self.outcome = Outcome()

    def play(self, prompts: Sequence[Sequence[Page]], num_measured: int) -> Outcome:
        """Ask all prompts, in this order; measure the last ``num_measured``."""
        for position in reversed(range(len(prompts))):
            for page in prompts[position]:
                self._next_use.setdefault(page, []).append(position)
        self._waiting = list(enumerate(prompts))[::-1]
        self._first_measured = len(prompts) - num_measured
        for client in range(self._setting.concurrency):
            self._after(client * APART_S, self._issue)
        while self._events:
            self._now_s, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
        return self.outcome

    def _after(self, delay_s: float, event: Callable[..., None], *arguments: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._num_events, event, arguments))

    # ---- placement ---------------------------------------------------------------------------------------------

    def _issue(self) -> None:
        if not self._waiting:
            return
        self._position, pages = self._waiting.pop()
        if self._position == self._first_measured:
            self.outcome = Outcome()
        work = _Work(str(self._position), pages, self._now_s, self._position >= self._first_measured)
        if self._setting.policy == ROUTER:
            work.num_new = len(pages) * PAGE_TOKENS
            self._enqueue(work, self._router.place(pages))
            return
        prompt = self._prompt(work)
        active = range(len(self._ranks))
        wait = self._dispatcher.wait(prompt, active, self._now_s) if self._setting.waits else None
        if wait is None:
            self._place(work, prompt)
        else:
            self.outcome.num_held_back += 1
            self._held.append((work, prompt, wait))

    def _prompt(self, work: _Work) -> Prompt:
        """As the dispatcher sees it now."""
        for rank in range(len(self._ranks)):
            self._report(rank)
        own = [rank.tree.match(work.pages) for rank in self._ranks]
        return Prompt(
            num_tokens=len(work.pages) * PAGE_TOKENS,
            cached_tokens=[num * PAGE_TOKENS for num in own],
            fetchable_tokens=self._reach(work.pages, 0) * PAGE_TOKENS if self._setting.fetches else 0,
            tokens=PagedPrompt(work.pages, PAGE_TOKENS),
        )

    def _place(self, work: _Work, prompt: Prompt) -> None:
        rank = self._dispatcher.place(prompt, range(len(self._ranks)), self._now_s).rank
        work.num_new = prompt.num_tokens - max(prompt.cached_tokens[rank], prompt.fetchable_tokens)
        if self._setting.evicts in BY_LOSS:
            self._tell(work, rank)
        self._enqueue(work, rank)

    def _tell(self, work: _Work, number: int) -> None:
        """The rank learns what it is asked for, and its peers hear of it."""
        pages = page_numbers(work.pages)
        self._ranks[number].demand.asked(pages, work.name)
        if self._setting.hears:
            for peer in self._ranks[:number] + self._ranks[number + 1 :]:
                peer.demand.peer_access(pages)

    def _enqueue(self, work: _Work, number: int) -> None:
        rank = self._ranks[number]
        rank.waiting.append(work)
        if not rank.is_busy:
            rank.is_busy = True
            self._after(0.0, self._next_batch, number)

    def _send_on(self) -> None:
        """Place what was held back for pages that are there now, or will not come."""
        for held in list(self._held):
            work, _, wait = held
            prompt = self._prompt(work)
            has_come = prompt.cached_tokens[wait.rank] >= wait.num_tokens
            if has_come or not self._dispatcher.is_pending(prompt, wait):
                self._held.remove(held)
                self._place(work, prompt)

    def _report(self, number: int) -> None:
        rank, setting = self._ranks[number], self._setting
        prefilling = rank.prefilling
        counts = setting.counts_displaced and not self._arena.has_room
        report = LoadReport(
            taken_s=math.nextafter(self._now_s, math.inf),
            num_running=len(rank.decoding),
            num_waiting=len(prefilling),
            pending_prefill_tokens=sum(work.num_new for work in prefilling),
            ongoing_tokens=sum(len(work.pages) for work in prefilling + rank.decoding) * PAGE_TOKENS,
            unused_tokens=(setting.pool_pages - len(rank.tree)) * PAGE_TOKENS if counts else None,
            total_prefill_tokens=rank.computed_tokens,
            total_prefill_us=round(rank.computed_tokens * TOKEN_S * 1e6),
        )
        self._dispatcher.reported(number, report)

    # ---- service -----------------------------------------------------------------------------------------------

    def _reach(self, pages: Sequence[Page], start: int) -> int:
        """Leading pages that somebody holds from ``start`` on."""
        for number in range(start, len(pages)):
            if not self._holders.get(pages[number]) and not self._is_in_arena(pages[number]):
                return number
        return len(pages)

    def _next_batch(self, number: int) -> None:
        """Prefill those that wait; else one step of all that decode; else nothing."""
        rank, room, taken_s = self._ranks[number], CHUNK_PAGES, 0.0
        if rank.chunked is not None:
            room -= self._join(rank, rank.chunked, room)
        while rank.waiting and room > 0 and rank.chunked is None:
            found = self._admit(rank, rank.waiting[0])
            if found is None:
                break
            taken_s += found * PAGE_TOKENS * FETCH_S
            room -= self._join(rank, rank.waiting.pop(0), room)
        if rank.batch:
            num_computed = sum(work.num_in_batch for work in rank.batch) * PAGE_TOKENS
            self._after(taken_s + num_computed * TOKEN_S, self._prefilled, number)
        elif rank.decoding:
            self._after(STEP_S + STEP_OF_REQUEST_S * len(rank.decoding), self._decoded, number)
        else:
            rank.is_busy = False

    def _admit(self, rank: _Rank, work: _Work) -> int | None:
        """Lock what is there, and set room aside for what is fetched: so many pages. None: it has to wait."""
        pages, outcome = work.pages, self.outcome
        most = len(pages) - 1
        own = min(rank.tree.match(pages), most)
        reached = min(self._reach(pages, own), most) if self._setting.fetches else own
        if own:
            rank.tree.touch(pages[:own])
        rank.tree.lock(pages[:own])
        # The answer begins a page of its own.
        if len(pages) - own + 1 > rank.tree.num_free + rank.tree.num_evictable:
            rank.tree.unlock(pages[:own])
            return None
        rank.demand.served(work.name)
        rank.tree.reserve(reached - own)
        work.num_locked, work.num_reserved, work.num_done = own, reached - own, reached
        if work.is_measured:
            outcome.num_tokens += len(pages) * PAGE_TOKENS
            outcome.num_cached += reached * PAGE_TOKENS
            outcome.num_fetched += (reached - own) * PAGE_TOKENS
            self._count_copies()
        return reached - own

    def _count_copies(self) -> None:
        outcome, trees = self.outcome, [rank.tree for rank in self._ranks]
        outcome.distinct.append(distinct_share(trees, self._holders))
        if len(outcome.distinct) % SPARE_EVERY == 1:
            outcome.spare.append(spare_share(trees, self._holders))

    def _join(self, rank: _Rank, work: _Work, room: int) -> int:
        """Take as much of a request into the batch as there is room: so many pages."""
        work.num_in_batch = min(room, len(work.pages) - work.num_done)
        has_room = rank.tree.reserve(work.num_in_batch)
        assert has_room, "what was admitted fits"
        work.num_reserved += work.num_in_batch
        rank.batch.append(work)
        rank.chunked = work if work.num_done + work.num_in_batch < len(work.pages) else None
        return work.num_in_batch

    def _prefilled(self, number: int) -> None:
        rank = self._ranks[number]
        for work in rank.batch:
            rank.computed_tokens += work.num_in_batch * PAGE_TOKENS
            work.num_done += work.num_in_batch
            self._publish(number, work)
            if work.num_done == len(work.pages):
                rank.decoding.append(work)
                if work.is_measured:
                    self.outcome.ttft_s.append(self._now_s - work.issued_s)
        rank.batch = []
        self._send_on()
        self._next_batch(number)

    def _publish(self, number: int, work: _Work) -> None:
        """What has been computed enters the tree, as far as nobody was quicker."""
        tree, pages = self._ranks[number].tree, work.pages[: work.num_done]
        tree.give_back(work.num_reserved)
        work.num_reserved = 0
        num_there = tree.match(pages)
        tree.lock(pages[work.num_locked : num_there])
        work.num_locked = tree.insert(pages, num_there)
        for page in pages[num_there:]:
            self._holders[page] = self._holders.get(page, 0) | 1 << number

    def _decoded(self, number: int) -> None:
        rank = self._ranks[number]
        for work in list(rank.decoding):
            work.num_steps += 1
            if work.num_steps == DECODE_STEPS - 1:
                rank.decoding.remove(work)
                rank.tree.unlock(work.pages)
                self._after(APART_S, self._issue)
        self._next_batch(number)

    def _is_in_arena(self, page: Page) -> bool:
        """It counts as wanted if it is."""
        return bool(self._arena.prefix([str(page)], 0))

    # ---- eviction ----------------------------------------------------------------------------------------------

    def _tree(self, rank: int, demand: Demand) -> Tree:
        def gone(page: Page) -> None:
            self.outcome.num_evicted += 1
            copy = self._copy_of(rank, page)
            self.outcome.num_evicted_last += copy is None
            self._holders[page] &= ~(1 << rank)
            # What a peer has stays out of the arena.
            if copy is SourceKind.HOST and not self._is_in_arena(page):
                self._arena.insert([str(page)])

        return Tree(self._setting.pool_pages, victims=self._victims(rank, demand), gone=gone)

    def _victims(self, rank: int, demand: Demand) -> Victims:
        share = FETCH_S / TOKEN_S

        def looking(loss: Callable[[Page, SourceKind | None], float], near: int, looks: Looks | None = None) -> Victims:
            def look(pages: Sequence[Page]) -> list[Leaf]:
                copies = [self._copy_of(rank, page) for page in pages]
                return [Leaf(page, "", copy, loss(page, copy)) for page, copy in zip(pages, copies, strict=True)]

            return Victims(look, near, looks, self._setting.splits)

        def expected(page: Page, copy: SourceKind | None) -> float:
            return (1.0 if copy is None else share) * demand.reuse_probabilities(page_numbers([page]))[0]

        def expected_by_age(page: Page, copy: SourceKind | None) -> float:
            age, _ = demand.age_and_accesses(page_number(page))
            return (1.0 if copy is None else share) / (age + 1)

        match self._setting.evicts:
            case "lru":
                return looking(lambda page, copy: 0.0, 1)
            case "duplicates first":
                return looking(lambda page, copy: float(copy is None), NEAR_LEAVES)
            case "loss":
                return looking(expected, NEAR_LEAVES, Looks())
            case "loss by age":
                return looking(expected_by_age, NEAR_LEAVES, Looks())
            case "random":
                return looking(lambda page, copy: self._rng.random(), ALL_LEAVES)
            case "belady":
                return looking(lambda page, copy: -self._wanted_at(page), ALL_LEAVES)
            case other:
                raise ValueError(f"nobody evicts by {other}")

    def _copy_of(self, rank: int, page: Page) -> SourceKind | None:
        if self._setting.fetches and self._holders.get(page, 0) & ~(1 << rank):
            return SourceKind.PEER
        # What nobody has goes down when it goes, and a full arena makes room for it.
        return SourceKind.HOST if self._setting.arena_pages else None

    def _wanted_at(self, page: Page) -> int:
        """The next prompt that wants it, as far as it may not have been served yet."""
        served = self._position - self._setting.concurrency
        return next((use for use in reversed(self._next_use.get(page, ())) if use > served), 1 << 30)
