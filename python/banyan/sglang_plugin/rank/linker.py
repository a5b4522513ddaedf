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
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from banyan import faults
from banyan.arena.prefetch import Worth
from banyan.cache import LOST, PrefixCache
from banyan.config import Config
from banyan.core import SourceKind
from banyan.disagg import Forwards, TakeBacks
from banyan.sglang_plugin import page_hash, runtime, seams
from banyan.sglang_plugin.pools.choose import open_device
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.pools.state_pool import States
from banyan.sglang_plugin.pools.two_pools import Windows, pools_of
from banyan.sglang_plugin.rank import report, requests, times
from banyan.sglang_plugin.rank.arena_events import PageEvent, events_for
from banyan.sglang_plugin.rank.figures import RankFigures
from banyan.sglang_plugin.rank.membership import ALL_LAYERS, Membership
from banyan.sglang_plugin.rank.memberships import Memberships
from banyan.sglang_plugin.rank.node_demand import NodeDemand
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.publication import Publication
from banyan.sglang_plugin.rank.read_elsewhere import ReadElsewhere
from banyan.sglang_plugin.rank.shards import Shards
from banyan.sglang_plugin.rank.shareable import check_shareable
from banyan.sglang_plugin.rank.store_events import StoreEvents
from banyan.sglang_plugin.rank.window_places import RankWindows, portions
from banyan.supply import Part
from banyan.telemetry import Counters, Dropped, Pseudonyms

logger = logging.getLogger("banyan")

ENTRIES = (
    "arrive",
    "lookup",
    "load",
    "start_layer_wise_loading",
    "cancel_queued_load",
    "offload",
    "_poll",
    "take_events",
)
"""Where SGLang calls in, but for the waits for data: what Banyan costs the scheduler thread."""

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
        began_s = time.monotonic()
        seams.verify("scheduler")
        check_shareable(components, params)
        pools = pools_of(params)
        if params.disable:
            logger.warning("banyan: SGLang keeps no radix cache for this model: nothing will be shared")
        page_hash.prepare(params.page_size)
        config, carried = runtime.config(), runtime.bookkeeping(server_args)
        assert config is not None and carried is not None
        self.pools: dict[PoolName, object] = {PoolName.KV: pools.pool}
        self.forward_stream = forward_stream
        self._page_tokens, self._shards = params.page_size, Shards(params)
        self._allocator = pools.allocator
        self.counters = Counters()
        self.arena_events = events_for(params, has_windows=pools.beside is not None)
        member = partial(
            Membership,
            server_args=server_args,
            config=config,
            carried=carried,
            device=open_device(config, pools.in_use),
            page_tokens=self._page_tokens,
            forward_stream=forward_stream,
            record_ready=self.record_offload_ready,
            counters=self.counters,
            arena_events=self.arena_events,
        )
        self._windows: RankWindows | None = None
        self._queued: dict[str, str] = {}
        portion = ALL_LAYERS
        if pools.beside is not None:
            is_window = isinstance(pools.beside, Windows)
            self.pools[PoolName.SWA if is_window else PoolName.MAMBA] = pools.beside.pool
            portion, behind = portions(pools.beside)
            self._windows = RankWindows(pools.beside, member(pool=pools.beside.pool, drafts=(), portion=behind))
        self._member = member(pool=pools.pool, drafts=drafts_of(params), portion=portion)
        self._access, self._seats = self._member.access, self._member.seats
        fixed_tokens = self._state_tokens() if isinstance(pools.beside, States) else 0.0
        self._planner = self._make_planner(config, pools.num_layers, fixed_tokens)
        # Shards of one rank would have to agree on when to go on.
        can_wait = self._shards.is_one and self._member.follows_reads
        self.elsewhere = ReadElsewhere(lambda: self._member.tier, self._planner, self._page_tokens, can_wait=can_wait)
        self._cache = self._make_cache()
        beside = () if self._windows is None else ((self._windows.member, self._windows.allocator),)
        self._memberships = Memberships((self._member, self._allocator), *beside)
        self._keep_time(pools.num_layers)
        if isinstance(pools.beside, States):
            self._let_states_wait(params.req_to_token_pool)
        requests.look_ahead(page_hash.tokens_ahead(is_eagle=params.is_eagle))
        self._publication = Publication(self._cache, self._member, self._page_tokens, self._windows)
        self._access.attach(self._publication.publish)
        self._access.guard(pools.allocator, self._cache)
        self._figures = self._make_figures(began_s, Pseudonyms(carried["server"]))
        report.start(self, enable_metrics=server_args.enable_metrics, labels=self._labels())
        self._cannot_raise()
        _installed = self

    def _make_planner(self, config: Config, num_layers: int, fixed_tokens: float) -> RankPlanner:
        planner = RankPlanner(
            num_layers=num_layers,
            page_tokens=self._page_tokens,
            min_pages=-(-config.min_fetch_tokens // self._page_tokens),
            num_in_step=self._seats.layout.attn_dp,
            fixed_tokens=fixed_tokens,
        )
        faults.hush(planner, "became", "started", "moved", "forward_begins", "forward_ended", "forward_took")
        return planner

    def _cannot_raise(self) -> None:
        """What SGLang calls of this object, and what it gets where that fails."""
        for name, otherwise, stops in (
            ("lookup", lambda rid, transfers: [], False),
            ("load", lambda rid, transfers: not self.cancel_queued_load(rid) and False, True),
            ("cancel_queued_load", lambda rid: True, True),
            ("start_layer_wise_loading", lambda: LOST, True),
            ("finish_layer_wise_loading", lambda index: False, True),
            ("offload", lambda transfers, session_id=None: False, True),
            ("num_completed_offloads", lambda: self._access.num_completed, False),
            ("pop_completed_offload", lambda: False, False),
            ("reset", lambda: None, True),
            ("close", lambda: None, True),
        ):
            method = getattr(self, name)
            setattr(self, name, faults.quiet(method, f"linker.{name}", otherwise, stops=stops))
        faults.hush(self, "_poll_tiers", "arrive", "offer_again", "_forget")
        faults.stop_with(self._stop)
        faults.count_at(self._member.count_failure)

    def _stop(self) -> None:
        """Share nothing from now on: something that keeps wrong pages from being shared has failed."""
        self.layer_done_counter.wait_for(self._cache.stop())
        if self.take_backs is not None:
            self.take_backs.stop()
        self._publication.stop()

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

    def _keep_time(self, num_layers: int) -> None:
        block = self._member.block
        if self._shards.is_one:
            beside = () if self._windows is None else (self._windows.allocator,)
            times.load_without_circles(self._cache, self._allocator, *beside)
        if self._seats.layout.steps_together:
            token_bytes = block.block_bytes // self._page_tokens
            times.step_together(
                self._allocator, self._planner, token_bytes=token_bytes, is_whole_rank=self._shards.is_one
            )
        times.pace_writes(self._planner, self._member, self._windows)
        self.forwards = Forwards()
        self.layer_done_counter = times.time_layers(
            self._cache,
            self._planner,
            self._member,
            num_layers=num_layers,
            # A draft's layers lie behind the model's in a page.
            num_page_layers=num_layers if self._windows is not None else len(block.layer_bytes),
            counters=self.counters,
            forwards=self.forwards,
        )
        # Before anybody keeps one of these methods.
        self._control_us = times.time_control((self, ENTRIES), (self._cache, ("retire", "drain")))

    def _make_figures(self, began_s: float, pseudonyms: Pseudonyms) -> RankFigures:
        return RankFigures(
            member=self._member,
            memberships=self._memberships,
            windows=self._windows,
            allocator=self._allocator,
            planner=self._planner,
            demand=self.demand,
            dropped=self.dropped,
            counters=self.counters,
            control_us=self._control_us,
            page_tokens=self._page_tokens,
            began_s=began_s,
            pseudonyms=pseudonyms,
        )

    def _in_arena(self) -> Part:
        return self._cache.part(self._seats.arenas)

    def _state_tokens(self) -> float:
        """How many tokens' keys and values weigh as much as the state that a fetch brings besides."""
        assert self._windows is not None
        return self._windows.member.block.block_bytes * self._page_tokens / self._member.block.block_bytes

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
        return self.is_whole_rank and self._windows is None and runtime.is_on("victims")

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

    def arrive(self, request: str) -> None:
        """A request has come to this rank's queue: remember what it asks for, and let the tiers below prepare."""
        keys = requests.prompt_keys(request, self._page_tokens)
        if not keys:
            return
        requests.when_gone(request, self._forget)
        if self.chooses_victims:
            self.demand.asked(keys, request)
        if self._member.tier is None or (self._member.guards_adapters and requests.is_of_this_server(request)):
            return
        self._member.lookout.saw(request, keys)
        worth: Worth = partial(self._planner.num_to_read, requests.facts_of_all_pages(request, self._page_tokens))
        if self._windows is not None:
            self._windows.arrive_behind(self._member.tier, request, keys, worth)
            return
        self._member.tier.arrive(request, keys, worth, self.elsewhere.reads_of(request), requests.source_of(request))

    def _forget(self, request: str) -> None:
        """SGLang has forgotten the request."""
        self._cache.forget(request)
        if self.chooses_victims:
            self.demand.served(request)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefix lengths of the tail, in pages, that the peers can supply."""
        keys, began_ns = transfers[0].keys, time.time_ns()
        request = requests.facts(requests.id_of_rid(rid), self._page_tokens)
        offer = self._cache.prepare(request, keys)
        requests.record_span(request.id, request.span(len(keys), offer))
        num_pages = self._planner.num_pages(request, len(keys), offer)
        self._planner.spans.looked_up(request.id, began_ns, offer, num_pages)
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
        request = requests.id_of_rid(rid)
        fetch = self._cache.admit(request, full.keys, self._access.frames(full.device_indices), wanted)
        if fetch is None:
            return False
        self._queued[rid] = request
        requests.record_fetch(fetch)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        # What was admitted under this name, whoever has it now.
        return self._cache.cancel(self._queued.pop(rid, ""))

    # ---- move --------------------------------------------------------------------------------------------------

    def start_layer_wise_loading(self) -> int:
        self._queued.clear()
        return self._cache.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._cache.finish(counter_index)

    # ---- publish -----------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Pages have entered SGLang's tree: offer them once they are complete."""
        if self._cache.is_stopped:
            return False
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
        self._poll_tiers()

    def _poll_tiers(self) -> None:
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
        self._memberships.leave()
        self._cache.move_to(self._member.rejoin)
        if self._windows is not None:
            self._windows.rejoin()
        if self._allocator.available_size() < self._allocator.num_pages * self._page_tokens:
            self._publication.hold_back()

    @property
    def weights_epoch(self) -> int:
        """How often the weights have changed since the start."""
        return self._member.weights_epoch

    def stand_apart(self) -> None:
        """The weights have changed in part, nobody knows into what: share with no other rank."""
        self._memberships.stand_apart()
        self.weights_changed()

    def meet_again(self) -> None:
        """From the next change of the weights on, share with the ranks that took the same."""
        self._memberships.meet_again()

    def withdraw(self) -> None:
        """Lend nothing any more of what this rank holds now, above and below: it was to go, and SGLang cannot let it go
        yet. What enters its tree from now on is published.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self._quiesce()
        self._memberships.withdraw()

    def reset(self) -> None:
        # The tiers first: their copies read the pool under leases.
        self._quiesce()
        self._memberships.empty()
        self._cache.reset()
        self._access.forget()
        self._publication.start_anew()

    def close(self) -> None:
        self._quiesce()
        self._memberships.close_tiers()
        self._cache.reset()
        self._memberships.close()

    def _quiesce(self) -> None:
        """Nothing of this rank is queued or under way any more."""
        self._cache.quiesce()
        if self.take_backs is not None:
            self.take_backs.quiesce()
        self._memberships.wait_for_copies()
        self._cache.poll()

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        return self._figures.counters_now()

    def figures(self) -> dict[str, Any]:
        """What this rank is like now, and cheap to tell: for ``/metrics``."""
        return self._figures.gauges()

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        return {
            **self._figures.state(),
            "waits_for_errands": self.elsewhere.can_wait,
            "tells_arena": self.arena_events is not None,
            "tells_store": store_events.store_id if (store_events := self._store_events) is not None else "",
            "hook_failures": faults.counts(),
            "features_off": runtime.features_off(),
            "num_take_backs": 0 if self.take_backs is None else self.take_backs.num_open,
        }

    def _labels(self) -> dict[str, str]:
        return {"dp_rank": str(self._seats.dp_rank), "tp_rank": str(get_parallel().tp_rank)}
