# SPDX-License-Identifier: Apache-2.0
"""SGLang's eviction, with the choice of the leaf ours: the one whose reload cost costs least
(``banyan.planner.victims``).

SGLang drives a walk (start, the next leaf, evict it, ..., end) and its tree names the leaves, oldest first. Only what
the tree names is passed on, so a locked node, which a running request uses, never is. Scheduler thread only.

A leaf goes as a whole. So once pages have had to go, long runs of new pages are split (``banyan.planner.stretches``):
by a match that ends where the split shall be, as the match of another prompt would.

Leaves that end with a page that is kept are passed over while there is another one, and go last, the oldest first: so
a page that is kept makes no request wait. Each prefix that is kept ends a node of its own, so what is kept for longer
than what continues it does not go with that.

A leaf that nobody else has goes down to the arena before it goes, where pages need not lie there before (write-back,
``banyan.arena.write_back``). SGLang counts its pages as free at once, and they are when they have been copied.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_server_args

from banyan import faults
from banyan.arena.write_back import WriteBack
from banyan.core import SourceKind
from banyan.planner.stretches import STRETCHES_PER_POOL, least_stretch, splits
from banyan.planner.victims import CostShares, Leaf, Looks, Walk, at_once
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import prefill
from banyan.sglang_plugin.rank.one_rank import Rank

logger = logging.getLogger("banyan")

COLD_SHARE = 0.01
"""Of its reload cost, for an answer of which nobody is expected to go on: a prompt that waits for it counts as ever."""

MOST_STRETCHES_KNOWN = 8 * STRETCHES_PER_POOL
"""Several times what a pool can hold. More means that the tree was emptied meanwhile, and these are forgotten."""

MOST_SPARED_AGAIN = 64
"""Leaves that are kept and that a walk passes over anew to take a stretch behind the one that went before it."""


def after_init_cache_linker(result: None, cache: Any, linker: Any) -> None:
    """SGLang's cache has got its linker: choose its victims, where one process is the whole rank.

    Shards of one rank must evict alike, and each sees its peers at its own time. Beside other components a leaf is not
    all that a walk takes.
    """
    if not runtime.is_sharing():
        return
    policy = chosen_policy()
    if policy is not None:
        logger.info("banyan: SGLang evicts as %s says: which pages peers hold as well makes no difference", policy)
        return
    if not linker.is_whole_rank:
        logger.info("banyan: SGLang evicts by age: a rank of several shards takes no notice of what its peers hold")
        return
    if tuple(cache.tree_components) != (ComponentType.FULL,):
        logger.info("banyan: SGLang evicts by age: with sliding windows or states, a leaf is not all that goes")
        return
    prefill.tell_begun(linker.demand.served)
    allocator = cache.token_to_kv_pool_allocator
    allocator.is_copying_down = lambda: (write_back := linker.writes_back) is not None and write_back.is_copying
    allocator.least_evicted_tokens = at_once(linker.num_frames) * cache.page_size
    cache.banyan_victims = VictimChoice(cache, linker)


def chosen_policy() -> str | None:
    """The flag by which the user has chosen what SGLang evicts first, if he has."""
    args = get_server_args()
    if args.enable_session_radix_cache:
        return "--enable-session-radix-cache"
    return None if args.radix_eviction_policy == "lru" else f"--radix-eviction-policy {args.radix_eviction_policy}"


def after_insert(result: Any, cache: Any, params: Any) -> None:
    """A prompt's pages are in the tree: split what is new of them, where victims are ours."""
    victims: VictimChoice | None = getattr(cache, "banyan_victims", None)
    if victims is not None and params.key is not None:
        victims.came(params.key, result, lambda key: cache.match_prefix(MatchPrefixParams(key=key)).last_device_node)


def around_load_back(load_back: Callable[..., Any], wrapper: Any, req: Any) -> Any:
    """SGLang makes room for what a request is to fetch: count what that pushes out, none of it to where that lies."""
    linker, hit = wrapper.cache_linker, wrapper.hit_markers.get(req.rid)
    counters = getattr(linker, "counters", None)
    if hit is None or counters is None:
        return load_back(wrapper, req)
    before, write_back = counters.num_evicted_pages, linker.writes_back
    try:
        with nullcontext() if write_back is None else write_back.sparing(hit.tail_hashes):
            return load_back(wrapper, req)
    finally:
        counters.displaced_pages += counters.num_evicted_pages - before


class VictimChoice:
    """Stands between SGLang's cache and its tree core while a walk runs: the core's three steps of a walk are replaced
    on that object."""

    def __init__(self, cache: Any, rank: Rank) -> None:
        self._core = core = cache.tree_core
        self._allocator = cache.token_to_kv_pool_allocator
        self._page_tokens = cache.page_size
        self._kept, self._ends = rank.kept_in_pool, rank.ends_in_pool
        self._writes_back: Callable[[], WriteBack | None] = lambda: rank.writes_back
        self._write_back: WriteBack | None = None
        self._spared: list[Any] = []
        self._has_spared_gone = False
        self._copies_of, self._cold = rank.cache.copies_of, rank.answers.cold
        self._shares = CostShares(rank.move_share, time.monotonic)
        self._demand, self._counters, self._dropped = rank.demand, rank.counters, rank.dropped
        self._stretch_pages = least_stretch(rank.num_frames)
        self._least_tokens = at_once(rank.num_frames) * self._page_tokens
        self._stretches: set[int] = set()
        self._theirs = (core.evict_device_start, core.evict_device_next_node, core.evict_device_end)
        self._start, self._next, self._end = map(runtime.STOPWATCH.elsewhere, self._theirs)
        self._looks = Looks()
        self._walk: Walk | None = None
        self._has_begun = False
        self._tracker: dict[Any, int] = {}
        self._steps: dict[int, Any] = {}
        self._last_step: Any = None
        self._num_asked = self._num_tokens = self._num_gone = 0
        """Tokens that SGLang asks for, and those that go where nothing is kept: several pages at once."""
        self._chosen: Leaf | None = None

        def step(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
            name = f"victims.{ours.__name__}"
            return faults.quiet(runtime.STOPWATCH.wrap(f"evict.{ours.__name__}", ours), name, theirs)

        core.evict_device_start = step(self.start, self._start_anew)
        core.evict_device_next_node = step(self.next, self._next_of_a_new_walk)
        core.evict_device_end = step(self.end, self._end_for_good)

    def came(self, key: Any, result: Any, node_at: Callable[[Any], int]) -> None:
        """The pages of ``key`` are in the tree. ``node_at`` has a node end where a key does, and names it."""
        if result.rotation_tail_declined:
            return
        page = self._page_tokens
        for num_behind in self._behind_kept(result.last_device_node) if self._kept else ():
            node_at(key[: (len(key) // page - num_behind) * page])
        if not self._counters.num_evicted_pages:
            return
        at = splits(result.prefix_len // page, len(key) // page, self._stretch_pages)
        stretches = [node_at(key[: number * page]) for number in at]
        if len(self._stretches) > MOST_STRETCHES_KNOWN:
            self._stretches.clear()
        # Behind the first stretch there is always another one. The last keeps the name of the whole.
        self._stretches.update(stretches[1:], [result.last_device_node] if stretches else [])

    def start(self, component: Any, num_tokens: int) -> None:
        self._num_asked = num_tokens
        self._num_tokens = num_tokens = max(num_tokens, self._least_tokens)
        self._start(component, num_tokens)
        self._has_begun = True

        def begin_again() -> None:
            self._spared.clear()
            self._end(component)
            self._start(component, num_tokens)

        self._begin_again = begin_again
        self._shares.refresh()
        self._write_back = self._writes_back()
        if self._write_back is not None:
            self._write_back.begin()
        self._walk = Walk(
            lambda: self._next_oldest(component), begin_again, self._look, self._looks, uncovers=self._uncovers
        )

    def next(self, component: Any, tracker: dict[Any, int]) -> Any:
        """The tree's own step for the leaf that goes now."""
        assert self._walk is not None
        self._count(tracker.get(component, 0))
        self._tracker = tracker
        if tracker.get(component, 0) >= self._num_tokens:
            return self._next(component, tracker)
        self._chosen = self._walk.choose()
        if self._chosen is None and not self._spared and self._has_spared_gone:
            # Before a leaf that was kept and has gone there may be another one.
            self._has_spared_gone = False
            self._begin_again()
            self._chosen = self._walk.choose()
        is_short = tracker.get(component, 0) < self._num_asked and not self._allocator.has_what_it_needs
        if self._chosen is None and self._spared and is_short:
            return self._next_spared()
        if self._chosen is None:
            return self._last_step
        self._chosen = self._taken_down(self._chosen)
        return self._steps.pop(self._chosen.node)

    def end(self, component: Any) -> None:
        self._count(self._tracker.get(component, 0))
        self._has_begun = False
        self._end(component)
        write_back, self._write_back = self._write_back, None
        if write_back is not None:
            # Beyond the walk it is the tier's alone: new weights have another one, in the old one's place.
            write_back.send()
        self._walk = self._chosen = self._last_step = None
        self._spared.clear()
        self._has_spared_gone = False
        self._steps.clear()
        self._tracker, self._num_gone = {}, 0

    def _give_up(self) -> None:
        """From now on SGLang chooses."""
        write_back = self._write_back or self._writes_back()
        self._writes_back, self._write_back = lambda: None, None
        if write_back is not None:
            write_back.end()
        self._core.evict_device_start, self._core.evict_device_next_node, self._core.evict_device_end = self._theirs

    def _start_anew(self, component: Any, num_tokens: int) -> None:
        self._end_for_good(component)
        self._start(component, num_tokens)

    def _next_of_a_new_walk(self, component: Any, tracker: dict[Any, int]) -> Any:
        self._start_anew(component, self._num_tokens)
        return self._next(component, tracker)

    def _end_for_good(self, component: Any) -> None:
        self._give_up()
        if self._has_begun:
            self._end(component)

    def _next_oldest(self, component: Any) -> int | None:
        while True:
            step = self._next(component, self._tracker)
            if step.node_id is None:
                self._last_step = step
                return None
            if not self._kept or self._core.get_last_hash_value(step.node_id) not in self._kept:
                self._steps[step.node_id] = step
                return int(step.node_id)
            self._spared.append(step)

    def _next_spared(self) -> Any:
        step = self._spared.pop(0)
        self._has_spared_gone = True
        key = self._core.get_last_hash_value(step.node_id)
        self._chosen = self._taken_down(Leaf(step.node_id, key, self._copies_of([key])[0], math.inf))
        return step

    def _taken_down(self, leaf: Leaf) -> Leaf:
        """A leaf that goes, as it is when it is gone: the arena may have found no frames for it, and a peer may have
        dropped its copy since this one was looked at."""
        if self._write_back is None or not leaf.key:
            return leaf
        if leaf.copy is SourceKind.PEER and self._copies_of([leaf.key]) == [SourceKind.PEER]:
            return leaf
        stays = self._write_back.leaving(self._core.get_hash_values(leaf.node))
        return Leaf(leaf.node, leaf.key, SourceKind.HOST if stays else None, leaf.reload_cost)

    def _behind_kept(self, node: int) -> list[int]:
        """How many pages of a node come behind each prefix that is kept and ends within it."""
        keys = self._core.get_hash_values(node)
        kept = takewhile(self._kept.__contains__, keys[:-1])
        return [len(keys) - place for place, key in enumerate(kept, 1) if key in self._ends]

    def _uncovers(self, node: int) -> bool:
        if node not in self._stretches:
            return False
        self._stretches.discard(node)
        return len(self._spared) <= MOST_SPARED_AGAIN

    def _look(self, nodes: Sequence[int]) -> list[Leaf]:
        """By their last pages: whoever holds that of a leaf holds the pages before it."""
        self._counters.evict_looks += len(nodes)
        last_pages = [self._core.get_last_hash_value(node) for node in nodes]
        keys = [key for key in last_pages if key is not None]
        copies = self._copies_of(keys)
        if self._write_back is not None and self._write_back.has_room:
            # What nobody has goes down when it goes.
            copies = [SourceKind.HOST if copy is None else copy for copy in copies]
        reload_costs = self._shares.reload_costs(copies, self._demand.reuse_probabilities(keys))
        found = dict(zip(keys, zip(copies, reload_costs, strict=True), strict=True))
        cold = set(self._cold(keys))
        # What has no key nobody can find.
        return [
            Leaf(node, key or "", *found.get(key, (None, 0.0)))
            if key not in cold or not self._is_answer(node)
            else Leaf(node, key, found[key][0], COLD_SHARE * found[key][1])
            for node, key in zip(nodes, last_pages, strict=True)
        ]

    def _is_answer(self, node: int) -> bool:
        """Whether all pages of a node are cold that ends with such a one: a prompt's do not go with its answer."""
        return bool(self._cold(self._core.get_hash_values(node)[:1]))

    def _count(self, num_tokens: int) -> None:
        """Tokens that have gone since the last step were of the leaf that was chosen then."""
        if self._chosen is not None:
            num_pages = (num_tokens - self._num_gone) // self._page_tokens
            is_duplicate = self._chosen.copy is not None
            self._counters.evicted_duplicate_pages += num_pages * is_duplicate
            self._counters.evicted_last_pages += num_pages * (not is_duplicate)
            self._looks.earn(num_pages)
            if num_pages:
                key = self._chosen.key
                self._dropped.went(key, num_pages, self._chosen.copy, is_again=self._demand.is_asked_again(key))
            self._chosen = None
        self._num_gone = num_tokens
