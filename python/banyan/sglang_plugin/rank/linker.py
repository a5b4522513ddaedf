# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker, served by the other ranks' pools.

SGLang drives: ``lookup`` and ``load`` while it builds a batch, ``start`` before the forward, a wait at every layer's
first KV read, ``finish`` after the forward, ``offload`` when pages enter its radix tree. This class only translates;
the decisions are in ``banyan.cache``. Everything runs on the scheduler thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from banyan.cache import PrefixCache
from banyan.core import SourceKind
from banyan.pacing.lockstep import LOAD_PATIENCE_S, MOST_MOVED_BYTES
from banyan.planner.demand import Demand
from banyan.refusals import pool_refusal
from banyan.refusals.speculation import draft_pool_refusal
from banyan.refusals.start import components_refusal, pool_layout_refusal
from banyan.sglang_plugin import page_hash, runtime, seams
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.choose import POOLS
from banyan.sglang_plugin.pools.drafts import drafts_of
from banyan.sglang_plugin.rank import prefill, report, requests
from banyan.sglang_plugin.rank.layer_wait import LayerWait
from banyan.sglang_plugin.rank.membership import Membership, Places
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.publication import Publication
from banyan.sglang_plugin.rank.shards import Shards
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
        allocator = params.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        _check_shareable(components, pool, allocator, (*drafts_of(params), *params.mtp_draft_mamba_pools))
        if params.disable:
            logger.warning("banyan: SGLang keeps no radix cache for this model: nothing will be shared")
        page_hash.prepare(params.page_size)
        config = runtime.config()
        carried = runtime.bookkeeping(server_args)
        assert config is not None and carried is not None
        self.pools: dict[PoolName, object] = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self._page_tokens = params.page_size
        self._shards = Shards(params)
        self._allocator = allocator
        self.counters = Counters()
        self.demand, self.dropped = Demand(allocator.num_pages), Dropped()
        self._member = Membership(
            server_args=server_args,
            config=config,
            carried=carried,
            pool=pool,
            drafts=drafts_of(params),
            page_tokens=self._page_tokens,
            forward_stream=forward_stream,
            record_ready=self.record_offload_ready,
            counters=self.counters,
        )
        self._access = self._member.access
        self._seats = self._member.seats
        places = self._member.join()
        self._planner = RankPlanner(
            num_layers=pool.layer_num,
            page_tokens=self._page_tokens,
            min_pages=-(-config.min_fetch_tokens // self._page_tokens),
            num_in_step=self._seats.layout.attn_dp,
        )
        self._cache = self._make_cache(places)
        if self._seats.layout.steps_together:
            self._step_together(allocator)
        self._can_wait = self._shards.is_one and self._member.follows_reads
        if self._can_wait:  # Shards of one rank would have to agree on when to go on.
            prefill.hold_back(self._is_awaited)
        self._time_forwards(pool)
        self._time_control()
        requests.look_ahead(page_hash.tokens_ahead(is_eagle=params.is_eagle))
        self._publication = Publication(self._cache, self._member, self._page_tokens)
        self._access.attach(self._publication.publish)
        self._access.guard(allocator, self._cache)
        report.start(self, enable_metrics=server_args.enable_metrics, labels=self._labels())
        _installed = self

    def _make_cache(self, places: Places) -> PrefixCache:
        shelf, peers, prefetch = places
        return PrefixCache(
            seats=self._seats,
            page_tokens=self._page_tokens,
            shelf=shelf,
            peers=peers,
            slots=self._member.sources(),
            prefetch=prefetch,
            planner=self._planner,
            agreed=self._shards.all,
            counters=self.counters,
            is_sent_for=self._is_sent_for,
        )

    def _step_together(self, allocator: QuarantiningAllocator) -> None:
        """Hold to the rules of ``banyan.pacing.lockstep``."""
        token_bytes = self._member.block.block_bytes // self._page_tokens
        # The quarantines of a rank's shards differ, and what depends on one must not decide about a batch of all.
        waits_briefly = self._shards.is_one
        prefill.step_together(
            most_moved_tokens=MOST_MOVED_BYTES // token_bytes,
            num_quarantined_tokens=lambda: allocator.num_quarantined_tokens if waits_briefly else 0,
        )
        if waits_briefly:
            allocator.load_patience_s = LOAD_PATIENCE_S

    def _time_forwards(self, pool: Any) -> None:
        """Measure layers and moves, and let the store write beside them."""
        if self._member.store is not None:
            self._planner.pace_writes(self._member.store, block_bytes=self._member.block.block_bytes)
        timer = self._access.time_layers(pool.layer_num, self._planner.forward_took)
        clock = LayerClock(
            num_layers=pool.layer_num,
            counters=self.counters,
            clock=time.perf_counter_ns,
            # Where the device has a clock of its own, the ticks are launches: what they time is no lesson.
            ended=self._planner.forward_ended if timer is None else None,
        )
        num_page_layers = len(self._member.block.layer_bytes)
        self.layer_done_counter = LayerWait(self._cache, clock, self._planner, pool.layer_num, num_page_layers, timer)

    def _time_control(self) -> None:
        """Measure what Banyan costs the scheduler thread: every entry point but the waits for data."""
        self._stopwatch = Stopwatch(time.perf_counter_ns)
        for owner, names in (
            (self, ("arrive", "lookup", "load", "start_layer_wise_loading", "cancel_queued_load", "offload", "_poll")),
            (self._cache, ("retire", "drain")),
        ):
            for name in names:
                setattr(owner, name, self._stopwatch.wrap(getattr(owner, name)))

    # ---- match and lease ---------------------------------------------------------------------------------------

    @property
    def is_whole_rank(self) -> bool:
        """Whether this process alone decides for its rank."""
        return self._shards.is_one

    def copy_of(self, key: str) -> SourceKind | None:
        """Where this rank could have a page of its tree from once it has left it: a peer or the arena."""
        return self._cache.copy_of(key)

    def move_share(self, kind: SourceKind) -> float | None:
        """What that takes, over computing; None while it was not measured."""
        return self._planner.move_share(kind)

    def arrive(self, rid: str) -> None:
        """A request has come to this rank's queue: remember what it asks for, and let the tiers below prepare."""
        keys = requests.prompt_keys(rid, self._page_tokens)
        if not keys:
            return
        if self.is_whole_rank:  # Shards of one evict by age.
            self.demand.asked(keys)
        if self._member.tier is None or (self._member.guards_adapters and requests.is_of_this_server(rid)):
            return
        self._member.lookout.saw(rid, keys)
        worth = partial(self._planner.num_to_read, requests.facts(rid, self._page_tokens))
        self._member.tier.arrive(rid, keys, worth, requests.reads_of(rid) if self._can_wait else None)

    def _is_sent_for(self, rid: str) -> bool:
        return self._member.tier is not None and self._member.tier.is_sent_for(rid)

    def _is_awaited(self, rid: str) -> bool:
        return self._member.tier is not None and self._member.tier.is_awaited(rid)

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
        return [num_pages] if self._shards.is_one else list(range(1, num_pages + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Lease the promised pages for the freshly allocated slots; False makes SGLang compute them."""
        (transfer,) = transfers
        fetch = self._cache.admit(rid, transfer.keys, self._access.frames(transfer.device_indices))
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
        (transfer,) = transfers
        self._publication.announce(transfer.keys)
        if self.is_whole_rank:
            self.demand.came(transfer.keys)
        return self._access.offload(transfer.device_indices, transfer.keys)

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

    def pop_completed_offload(self) -> bool:
        return self._access.pop_completed()

    # ---- life --------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Leave the old weights' namespace, and meet only peers that took the same update.

        Pages that stay in SGLang's tree (an update without a flush) belong to it: they are withdrawn, not freed. They,
        and what is computed on them, are published to nobody until the tree has been emptied.

        Raises:
            RuntimeError: when a peer does not stop reading the old pages.
        """
        self._quiesce()
        self._member.leave_tier()
        self._allocator.wait_for_readers()
        self._member.leave()
        self._cache.move_to(self._member.rejoin)
        if self._allocator.available_size() < self._allocator.num_pages * self._page_tokens:
            self._publication.hold_back()

    @property
    def weights_epoch(self) -> int:
        """How often the weights have changed since the start."""
        return self._member.weights_epoch

    def stand_apart(self) -> None:
        """The weights have changed in part, nobody knows into what: share with no other rank."""
        self._member.stand_apart()
        self.weights_changed()

    def meet_again(self) -> None:
        """From the next change of the weights on, share with the ranks that took the same."""
        self._member.meet_again()

    def reset(self) -> None:
        # The tiers first: their copies read the pool under leases.
        self._quiesce()
        self._member.empty()
        self._cache.reset()
        self._access.forget()
        self._publication.start_anew()

    def close(self) -> None:
        self._quiesce()
        self._member.close_tier()
        self._cache.reset()
        self._member.close()

    def _quiesce(self) -> None:
        """Nothing of this rank is queued or under way any more."""
        self._cache.quiesce()
        self._access.wait_for_copies()
        self._cache.poll()

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        self.counters.control_us = self._stopwatch.elapsed_ns // 1000
        self.counters.alloc_wait_us = self._allocator.wait_us
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
            "dropped": self.dropped.state(),
            "again_lasts": round(self.demand.again_lasts, 2),
            "waits_for_errands": self._can_wait,
            "up_s": round(time.monotonic() - self._began_s, 1),
        }

    def _labels(self) -> dict[str, str]:
        return {"dp_rank": str(self._seats.dp_rank), "tp_rank": str(get_parallel().tp_rank)}


def _check_shareable(components: set[Any], pool: Any, allocator: Any, drafts: Sequence[Any]) -> None:
    """Refuse what Banyan does not know how to share. ``drafts``: everything that a draft keeps."""
    if components != {ComponentType.FULL}:
        runtime.refuse(components_refusal([component.name for component in components]))
    if not isinstance(pool, POOLS) or not isinstance(allocator, QuarantiningAllocator):
        runtime.refuse(pool_refusal(pool_class=type(pool).__name__, supported=("MHA", "MLA", "DSA")))
    if not hasattr(pool, "banyan_geometry"):
        runtime.refuse(pool_layout_refusal())
    for draft in drafts:
        if not isinstance(draft, POOLS) or not hasattr(draft, "banyan_geometry"):
            runtime.refuse(draft_pool_refusal(f"a {type(draft).__name__}"))
