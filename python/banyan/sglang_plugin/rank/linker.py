# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker, served by the other ranks' pools.

SGLang drives: ``lookup`` and ``load`` while it builds a batch, ``start`` before the forward, a wait at every layer's
first KV read, ``finish`` after the forward, ``offload`` when pages enter its radix tree. This class only translates;
the decisions are in ``banyan.cache``. Everything runs on the scheduler thread.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from banyan.arena.prefetch import Worth
from banyan.cache import PrefixCache
from banyan.core import SourceKind
from banyan.disagg import Forwards, TakeBacks
from banyan.pacing.lockstep import LOAD_PATIENCE_S, most_moved_tokens
from banyan.sglang_plugin import page_hash, runtime, seams
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.choose import open_device
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.state_pool import States
from banyan.sglang_plugin.pools.two_pools import Windows, pools_of
from banyan.sglang_plugin.rank import prefill, report, requests
from banyan.sglang_plugin.rank.arena_events import ArenaEvents, PageEvent
from banyan.sglang_plugin.rank.layer_wait import LayerWait
from banyan.sglang_plugin.rank.membership import ALL_LAYERS, Membership, Portion
from banyan.sglang_plugin.rank.node_demand import NodeDemand
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.publication import Publication
from banyan.sglang_plugin.rank.read_elsewhere import ReadElsewhere
from banyan.sglang_plugin.rank.shards import Shards
from banyan.sglang_plugin.rank.shareable import check_shareable
from banyan.sglang_plugin.rank.store_events import StoreEvents
from banyan.sglang_plugin.rank.tiers import HostTier
from banyan.sglang_plugin.rank.window_places import BothStores, RankWindows, capped
from banyan.supply import Part
from banyan.telemetry import Counters, Dropped, LayerClock, Stopwatch

logger = logging.getLogger("banyan")

_installed: BanyanLinker | None = None


def installed() -> BanyanLinker:
    """The linker of this rank.

    Raises:
        RuntimeError: when SGLang has not built it.
    """
    if _installed is None:
        raise RuntimeError("SGLang has not built Banyan's linker in this process")
    return _installed


class BanyanLinker(UnifiedCacheLinker):
    """One rank's door to its peers. Built by SGLang once for each worker process."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        global _installed
        self._began_s = time.monotonic()
        seams.verify("scheduler")
        check_shareable(components, params)
        pools = pools_of(params)
        if params.disable:
            logger.warning("banyan: SGLang keeps no radix cache for this model: nothing will be shared")
        page_hash.prepare(params.page_size)
        config = runtime.config()
        assert config is not None
        self.pools: dict[PoolName, object] = {PoolName.KV: pools.pool}
        self.forward_stream = forward_stream
        self._page_tokens, self._shards = params.page_size, Shards(params)
        self._allocator = pools.allocator
        self.counters = Counters()
        self.arena_events = _arena_events(params, has_windows=pools.beside is not None)
        member = partial(
            Membership,
            server_args=server_args,
            config=config,
            carried=runtime.bookkeeping(server_args),
            device=open_device(config, pools.in_use),
            page_tokens=self._page_tokens,
            forward_stream=forward_stream,
            record_ready=self.record_offload_ready,
            counters=self.counters,
            arena_events=self.arena_events,
        )
        self._windows: RankWindows | None = None
        portion = ALL_LAYERS
        if pools.beside is not None:
            is_window = isinstance(pools.beside, Windows)
            self.pools[PoolName.SWA if is_window else PoolName.MAMBA] = pools.beside.pool
            portion, behind = _portions(pools.beside)
            self._windows = RankWindows(pools.beside, member(pool=pools.beside.pool, drafts=(), portion=behind))
        self._member = member(pool=pools.pool, drafts=drafts_of(params), portion=portion)
        self._access, self._seats = self._member.access, self._member.seats
        self._planner = RankPlanner(
            num_layers=pools.num_layers,
            page_tokens=self._page_tokens,
            min_pages=-(-config.min_fetch_tokens // self._page_tokens),
            num_in_step=self._seats.layout.attn_dp,
            fixed_tokens=self._state_tokens() if isinstance(pools.beside, States) else 0.0,
        )
        # Shards of one rank would have to agree on when to go on.
        can_wait = self._shards.is_one and self._member.follows_reads
        self.elsewhere = ReadElsewhere(lambda: self._member.tier, self._planner, self._page_tokens, can_wait=can_wait)
        self._cache = self._make_cache()
        if self._seats.layout.steps_together:
            self._step_together(pools.allocator)
        self._time_forwards(pools.num_layers)
        if isinstance(pools.beside, States):
            self._let_states_wait(params.req_to_token_pool)
        self._time_control()
        requests.look_ahead(page_hash.tokens_ahead(is_eagle=params.is_eagle))
        self._publication = Publication(self._cache, self._member, self._page_tokens, self._windows)
        self._access.attach(self._publication.publish)
        self._access.guard(pools.allocator, self._cache)
        report.start(self, enable_metrics=server_args.enable_metrics, labels=self._labels())
        _installed = self

    def _let_states_wait(self, pool: Any) -> None:
        """SGLang tells the pool of keys and values alone whom to wait for."""
        pool.register_layer_transfer_counter(self.layer_done_counter)

    def _make_cache(self) -> PrefixCache:
        shelf, supply = self._member.join()
        self.take_backs = TakeBacks(self._in_arena, self.counters) if self._member.takes_back else None
        cache = PrefixCache(
            seats=self._seats,
            page_tokens=self._page_tokens,
            shelf=shelf,
            supply=supply,
            planner=self._planner,
            agreed=self._shards.all,
            counters=self.counters,
            is_sent_for=self.elsewhere.is_sent_for,
            send_for=self.elsewhere.send_for,
            windows=self._windows.pages if self._windows is not None else None,
        )
        num_frames = self.num_frames * self._seats.layout.num_ranks
        self.demand, self.dropped = NodeDemand(cache, num_frames, self.counters), Dropped()
        return cache

    def _in_arena(self) -> Part:
        return self._cache.part(self._seats.arenas)

    def _state_tokens(self) -> float:
        """How many tokens' keys and values weigh as much as the state that a fetch brings besides."""
        assert self._windows is not None
        return self._windows.member.block.block_bytes * self._page_tokens / self._member.block.block_bytes

    def _step_together(self, allocator: QuarantiningAllocator) -> None:
        """Hold to the rules of ``banyan.pacing.lockstep``."""
        token_bytes = self._member.block.block_bytes // self._page_tokens
        # The quarantines of a rank's shards differ, and what depends on one must not decide about a batch of all.
        is_alone, planner = self._shards.is_one, self._planner

        def most_moved() -> int:
            measured = (planner.decode_us(), planner.token_us()) if is_alone else (None, None)
            return most_moved_tokens(token_bytes, *measured)

        prefill.step_together(
            most_moved_tokens=most_moved,
            num_quarantined_tokens=lambda: allocator.num_quarantined_tokens if is_alone else 0,
        )
        if is_alone:
            allocator.load_patience_s = LOAD_PATIENCE_S

    def _time_forwards(self, num_layers: int) -> None:
        """Measure layers and moves, and let the store write beside them."""
        self._pace_writes()
        timer = self._access.time_layers(num_layers, self._planner.forward_took)
        clock = LayerClock(
            num_layers=num_layers,
            counters=self.counters,
            clock=time.perf_counter_ns,
            # Where the device has a clock of its own, the ticks are launches: what they time is no lesson.
            ended=self._planner.forward_ended if timer is None else None,
        )
        # A draft's layers lie behind the model's in a page.
        num_page_layers = num_layers if self._windows is not None else len(self._member.block.layer_bytes)
        self.forwards = Forwards()
        self.layer_done_counter = LayerWait(
            self._cache, clock, self._planner, num_layers, num_page_layers, timer, self.forwards
        )

    def _pace_writes(self) -> None:
        store, block_bytes = self._member.store, self._member.block.block_bytes
        if store is None:
            return
        if self._windows is None or self._windows.member.store is None:
            self._planner.pace_writes(store, block_bytes=block_bytes)
            return
        window = self._windows.member
        whole_bytes = block_bytes + window.block.block_bytes
        shares = ((store, self._member.share), (window.store, window.share))
        self._planner.pace_writes(BothStores(shares), block_bytes=whole_bytes)

    def _time_control(self) -> None:
        """Measure what Banyan costs the scheduler thread: every entry point but the waits for data."""
        self._stopwatch = Stopwatch(time.perf_counter_ns)
        for owner, names in (
            (
                self,
                (
                    "arrive",
                    "lookup",
                    "load",
                    "start_layer_wise_loading",
                    "cancel_queued_load",
                    "offload",
                    "_poll",
                    "take_events",
                ),
            ),
            (self._cache, ("retire", "drain")),
        ):
            for name in names:
                setattr(owner, name, self._stopwatch.wrap(getattr(owner, name)))

    # ---- match and lease ---------------------------------------------------------------------------------------

    @property
    def is_whole_rank(self) -> bool:
        """Whether this process alone decides for its rank."""
        return self._shards.is_one

    @property
    def num_layers(self) -> int:
        """Of the model; a draft's are not among them."""
        return self.layer_done_counter.num_layers

    @property
    def completes_layers_in_order(self) -> bool:
        """Whether all layers lie in one pool, and a forward passes through them one by one."""
        return self._windows is None

    @property
    def chooses_victims(self) -> bool:
        """Whether its pages are evicted by what their loss costs: not where shards would have to choose alike, nor
        where a window goes with a leaf."""
        return self.is_whole_rank and self._windows is None

    @property
    def page_tokens(self) -> int:
        return self._page_tokens

    def frames(self, slots: torch.Tensor) -> Any:
        """Page numbers of whole pages of ``slots``, as copies into the pool take them."""
        return self._access.frames(slots)

    @property
    def num_frames(self) -> int:
        """Of the rank's pool."""
        return int(self._allocator.num_pages)

    def copies_of(self, keys: list[str]) -> list[SourceKind | None]:
        """Where this rank could have each page of its tree from once it has left it: a peer or the arena."""
        return self._cache.copies_of(keys)

    def move_share(self, kind: SourceKind) -> float | None:
        """What that takes, over computing; None while it was not measured."""
        return self._planner.move_share(kind)

    def arrive(self, rid: str) -> None:
        """A request has come to this rank's queue: remember what it asks for, and let the tiers below prepare."""
        keys = requests.prompt_keys(rid, self._page_tokens)
        if not keys:
            return
        if self.chooses_victims:
            self.demand.asked(keys, rid)
            requests.when_gone(rid, self.demand.served)
        if self._member.tier is None or (self._member.guards_adapters and requests.is_of_this_server(rid)):
            return
        self._member.lookout.saw(rid, keys)
        worth: Worth = partial(self._planner.num_to_read, requests.facts(rid, self._page_tokens))
        if self._windows is not None:
            self._arrive_with_windows(rid, keys, worth, self._member.tier, self._windows)
            return
        self._member.tier.arrive(rid, keys, worth, self.elsewhere.reads_of(rid), requests.source_of(rid))

    def _arrive_with_windows(
        self, rid: str, keys: list[str], worth: Worth, tier: HostTier, windows: RankWindows
    ) -> None:
        """Bring up as much as can be restored, and the window before its end."""
        num_held = tier.num_on_node(keys)
        num_there = num_held if tier.store is None else max(num_held, tier.store.num_stored(keys))
        tier.arrive(rid, keys, capped(worth, windows.restorable(keys, num_there) - num_held))
        num_coming = num_held + tier.prefetch.num_arriving(keys[num_held:])
        windows.arrive(rid, keys[: windows.restorable(keys, num_coming)])

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefix lengths of the tail, in pages, that the peers can supply."""
        keys, began_ns = transfers[0].keys, time.time_ns()
        request = requests.facts(rid, self._page_tokens)
        offer = self._cache.prepare(request, keys)
        requests.record_span(rid, request.span(len(keys), offer))
        num_pages = self._planner.num_pages(request, len(keys), offer)
        self._planner.spans.looked_up(rid, began_ns, offer, num_pages)
        if num_pages == 0:
            return []
        # One rank alone takes the longest. The shards of a tensor-parallel rank intersect their answers.
        lengths = self._cache.lengths(keys, num_pages)
        return list(islice(lengths, 1) if self._shards.is_one else lengths)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Lease the promised pages for the freshly allocated slots; False makes SGLang compute them."""
        full, *window = transfers
        wanted = None
        if self._windows is not None:
            wanted = self._windows.wanted(window[0].keys, window[0].device_indices)
        fetch = self._cache.admit(rid, full.keys, self._access.frames(full.device_indices), wanted)
        if fetch is None:
            return False
        requests.record_fetch(fetch)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._cache.cancel(rid)

    # ---- move --------------------------------------------------------------------------------------------------

    def start_layer_wise_loading(self) -> int:
        return self._cache.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._cache.finish(counter_index)

    # ---- publish -----------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Pages have entered SGLang's tree: offer them once they are complete."""
        full, *window = transfers
        self._publication.announce(full.keys)
        if self.chooses_victims:
            self.demand.came(full.keys)
        # Of a node whose window SGLang has freed there are full pages only.
        behind = None
        if window and self._windows is not None:
            behind = self._windows.node(window[0].keys, window[0].device_indices)
        return self._access.offload(full.device_indices, full.keys, behind)

    def offer_again(self, keys: list[str], full: torch.Tensor, window: tuple[list[str], torch.Tensor]) -> None:
        """A node that was offered before has a state, or window pages again, at other slots than before; maybe full
        pages too."""
        assert self._windows is not None
        self._publication.announce(keys)
        self._access.offer_again(full, keys, self._windows.node(*window))

    def num_completed_offloads(self) -> int:
        # SGLang asks on every scheduling step.
        self._poll()
        report.tick()
        return self._access.num_completed

    def _poll(self) -> None:
        self._access.poll()
        self._cache.poll()
        if self._member.tier is not None:
            self._member.tier.poll()
        if self._windows is not None:
            self._windows.poll()

    def pop_completed_offload(self) -> bool:
        return self._access.pop_completed()

    # ---- what routers are told ---------------------------------------------------------------------------------

    @property
    def _store_events(self) -> StoreEvents | None:
        return None if self._member.tier is None else self._member.tier.store_events

    def take_events(self) -> list[PageEvent]:
        """KV events of the tiers below the pool, since the last call."""
        if self.arena_events is None:
            return []
        store_events = self._store_events
        return [*self.arena_events.take(), *(store_events.take() if store_events is not None else ())]

    # ---- life --------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Leave the old weights' namespace, and meet only peers that took the same update.

        Pages that stay in SGLang's tree (an update without a flush) belong to it: they are withdrawn, not freed. They,
        and what is computed on them, are published to nobody until the tree has been emptied.

        Raises:
            RuntimeError: when a peer does not stop reading the old pages.
        """
        self._quiesce()
        for member, allocator in self._memberships():
            member.leave_tier()
            allocator.wait_for_readers()
            member.leave()
        self._cache.move_to(self._member.rejoin)
        if self._windows is not None:
            self._windows.rejoin()
        if self._allocator.available_size() < self._allocator.num_pages * self._page_tokens:
            self._publication.hold_back()

    def _memberships(self) -> list[tuple[Membership, QuarantiningAllocator]]:
        """Of full pages, and of window pages."""
        both = [(self._member, self._allocator)]
        return both if self._windows is None else [*both, (self._windows.member, self._windows.allocator)]

    @property
    def weights_epoch(self) -> int:
        """How often the weights have changed since the start."""
        return self._member.weights_epoch

    def stand_apart(self) -> None:
        """The weights have changed in part, nobody knows into what: share with no other rank."""
        for member, _ in self._memberships():
            member.stand_apart()
        self.weights_changed()

    def meet_again(self) -> None:
        """From the next change of the weights on, share with the ranks that took the same."""
        for member, _ in self._memberships():
            member.meet_again()

    def reset(self) -> None:
        # The tiers first: their copies read the pool under leases.
        self._quiesce()
        for member, _ in self._memberships():
            member.empty()
        self._cache.reset()
        self._access.forget()
        self._publication.start_anew()

    def close(self) -> None:
        self._quiesce()
        for member, _ in self._memberships():
            member.close_tier()
        self._cache.reset()
        for member, _ in self._memberships():
            member.close()

    def _quiesce(self) -> None:
        """Nothing of this rank is queued or under way any more."""
        self._cache.quiesce()
        if self.take_backs is not None:
            self.take_backs.quiesce()
        for member, _ in self._memberships():
            member.access.wait_for_copies()
        self._cache.poll()

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        self.counters.control_us = self._stopwatch.elapsed_ns // 1000
        self.counters.alloc_wait_us = sum(allocator.wait_us for _, allocator in self._memberships())
        self._planner.count(self.counters)
        self._member.count(self.counters)
        return self.counters

    def figures(self) -> dict[str, Any]:
        """What this rank is like now, and cheap to tell: for ``/metrics``."""
        copies = self._member.lookout.copies(time.monotonic())
        return {
            **self._member.figures(),
            **self._room(),
            "distinct_share": copies.distinct_share,
            "duplicate_share": copies.duplicate_share,
        }

    def _room(self) -> dict[str, int]:
        num_free = self._allocator.available_size() // self._page_tokens
        return {"num_pool_pages": self._allocator.num_pages, "num_free_pages": num_free}

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        return {
            **self._member.state(),
            **self._room(),
            **self._member.lookout.state(),
            **self.counters_now().as_dict(),
            **self._planner.state(),
            **({} if self._windows is None else {self._windows.told_as: self._windows.state()}),
            "dropped": self.dropped.state(),
            **self.demand.state(),
            "waits_for_errands": self.elsewhere.can_wait,
            "tells_arena": self.arena_events is not None,
            "tells_store": store_events.store_id if (store_events := self._store_events) is not None else "",
            "num_take_backs": 0 if self.take_backs is None else self.take_backs.num_open,
            "up_s": round(time.monotonic() - self._began_s, 1),
        }

    def _labels(self) -> dict[str, str]:
        return {"dp_rank": str(self._seats.dp_rank), "tp_rank": str(get_parallel().tp_rank)}


def _arena_events(params: Any, *, has_windows: bool) -> ArenaEvents | None:
    """What tells routers of the arena, where SGLang tells them of the pool and both mean the same by a page: not where
    keys are made of bigrams, nor where a page is worth nothing without its window."""
    is_told = params.enable_kv_cache_events and not params.disable
    return ArenaEvents() if is_told and not params.is_eagle and not has_windows else None


def _portions(beside: Windows | States) -> tuple[Portion, Portion]:
    """Of full pages, and of window pages or states; what the flags give a rank is divided between both kinds."""
    kind: Literal["window", "state"] = "window" if isinstance(beside, Windows) else "state"
    return Portion("full", beside.layers, 1.0 - beside.share), Portion(kind, beside.layers, beside.share)
