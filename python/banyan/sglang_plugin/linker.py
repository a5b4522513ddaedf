# SPDX-License-Identifier: Apache-2.0
"""SGLang's external linker, served by the other ranks' pools.

SGLang drives: ``lookup`` and ``load`` while it builds a batch, ``start`` before the forward, a wait at every layer's
first KV read, ``finish`` after the forward, ``offload`` when pages enter its radix tree. This class only translates;
the decisions are in ``banyan.cache``. Everything runs on the scheduler thread.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from banyan.cache import STORE, Offer, PrefixCache
from banyan.config import Config
from banyan.core import PrefixSpan
from banyan.planner import Run, SourceKind
from banyan.refusals import pool_refusal
from banyan.sglang_plugin import page_hash, report, requests, runtime, seams
from banyan.sglang_plugin.allocator import QuarantiningAllocator
from banyan.sglang_plugin.device_pool import DeviceMHAPool, DeviceMLAPool
from banyan.sglang_plugin.layer_wait import LayerWait
from banyan.sglang_plugin.membership import Membership
from banyan.sglang_plugin.planning import RankPlanner
from banyan.sglang_plugin.pool import SharedMHAPool, SharedMLAPool
from banyan.telemetry import Counters, LayerClock, Stopwatch

POOLS = (SharedMHAPool, SharedMLAPool, DeviceMHAPool, DeviceMLAPool)

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
        seams.verify("scheduler")
        allocator = params.token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        _check_shareable(components, pool, allocator)
        page_hash.prepare(params.page_size)
        config = runtime.config()
        carried = runtime.bookkeeping(server_args)
        assert config is not None and carried is not None
        self.pools: dict[PoolName, object] = {PoolName.KV: pool}
        self.forward_stream = forward_stream
        self._page_tokens = params.page_size
        self._tp_group = params.attn_tp_cache_group
        self._allocator = allocator
        self.counters = Counters()
        requests.count_into(self.counters)
        self._member = Membership(
            server_args=server_args,
            config=config,
            carried=carried,
            pool=pool,
            page_tokens=self._page_tokens,
            forward_stream=forward_stream,
            record_ready=self.record_offload_ready,
            counters=self.counters,
        )
        self._access = self._member.access
        self._seats = self._member.seats
        shelf, peers, prefetch = self._member.join()
        self._cache = PrefixCache(
            shelf=shelf,
            source=peers,
            counters=self.counters,
            min_fetch_pages=1,
            slots=self._member.sources(),
            prefetch=prefetch,
            worth=self._num_to_read,
        )
        self._plan_with(config, pool)
        self._time_control()
        self._access.attach(self._published)
        self._access.guard(allocator, self._cache)
        report.start(self, enable_metrics=server_args.enable_metrics, labels=self._labels())
        _installed = self

    def _plan_with(self, config: Config, pool: Any) -> None:
        """Measure layers and moves, decide by them, and let the store write beside them."""
        self._planner = RankPlanner(
            num_layers=pool.layer_num,
            page_tokens=self._page_tokens,
            min_pages=-(-config.min_fetch_tokens // self._page_tokens),
        )
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
        self.layer_done_counter = LayerWait(self._cache, clock, self._planner, pool.layer_num, timer)

    def _time_control(self) -> None:
        """Measure what Banyan costs the scheduler thread: every entry point but the waits for data."""
        self._stopwatch = Stopwatch(time.perf_counter_ns)
        for owner, names in (
            (self, ("arrive", "lookup", "load", "start_layer_wise_loading", "cancel_queued_load", "offload", "_tick")),
            (self._cache, ("retire", "drain")),
        ):
            for name in names:
                setattr(owner, name, self._stopwatch.wrap(getattr(owner, name)))

    # ---- match and lease ---------------------------------------------------------------------------------------

    def arrive(self, rid: str) -> None:
        """A request has come to this rank's queue: let the tiers below prepare for it."""
        keys = requests.prompt_keys(rid, self._page_tokens) if self._member.tier is not None else None
        if keys:
            assert self._member.tier is not None
            self._member.tier.arrive(keys, partial(self._num_to_read, rid))

    def _num_to_read(self, rid: str, num_missing: int, num_stored: int) -> int:
        return self._planner.num_to_read(rid, num_missing, num_stored)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefix lengths of the tail, in pages, that the peers can supply."""
        keys = transfers[0].keys
        offer = self._cache.lookup(rid, keys) or Offer(())
        found = [Run(self._kind(slot), length) for slot, length in offer.runs]
        num_pages = self._planner.num_pages(rid, len(keys), found)
        num_tokens = requests.num_prompt_tokens(rid)
        if num_tokens is not None:
            num_own_pages = (num_tokens - 1) // self._page_tokens - len(keys)
            self._record_span(rid, num_own_pages, offer)
            num_pages = self._num_exact(num_tokens, num_own_pages, num_pages)
        if num_pages == 0:
            return []
        # One rank alone takes the longest. The shards of a tensor-parallel rank intersect their answers.
        return [num_pages] if get_parallel().attn_tp_size == 1 else list(range(1, num_pages + 1))

    def _record_span(self, rid: str, num_own_pages: int, offer: Offer) -> None:
        own_tokens = num_own_pages * self._page_tokens
        max_tokens = own_tokens + offer.num_pages * self._page_tokens
        requests.record_span(rid, PrefixSpan(own_tokens, max_tokens, self._holder(offer)))

    def _num_exact(self, num_tokens: int, num_own_pages: int, num_pages: int) -> int:
        """One page less when a single token would be left to compute: torch rounds a matrix times one row differently
        from the same row among others (docs/design/0003), and a hit must give the tokens of a miss."""
        num_left = num_tokens - (num_own_pages + num_pages) * self._page_tokens
        return num_pages - (num_pages > 0 and num_left == 1)

    def _holder(self, offer: Offer) -> int:
        """The rank whose pool or arena part supplies most of the offer; this one when it comes from the store."""
        slot = max(offer.runs, key=lambda run: run[1], default=(STORE, 0))[0]
        return self._seats.dp_rank if slot == STORE else self._seats.rank_of(slot)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Lease the promised pages for the freshly allocated slots; False makes SGLang compute them."""
        (transfer,) = transfers
        offer = self._cache.admit(rid, transfer.keys, self._access.frames(transfer.device_indices))
        if not self._all_shards(offer is not None):
            self._planner.refused(rid)
            self._cache.cancel(rid)
            return False
        assert offer is not None
        moved = self._tokens_by_kind(offer)
        self._planner.leased(rid, moved)
        requests.record_fetch(rid, {kind.value: num_tokens for kind, num_tokens in moved.items()})
        return True

    def _tokens_by_kind(self, offer: Offer) -> dict[SourceKind, int]:
        tokens = dict.fromkeys((SourceKind.PEER, SourceKind.HOST, SourceKind.STORE), 0)
        for slot, num_pages in offer.runs:
            tokens[self._kind(slot)] += num_pages * self._page_tokens
        return tokens

    def _kind(self, slot: int) -> SourceKind:
        """What lies in a roster slot, or behind the mark of the store."""
        if slot == STORE:
            return SourceKind.STORE
        return SourceKind.HOST if self._seats.is_arena(slot) else SourceKind.PEER

    def _all_shards(self, granted: bool) -> bool:
        """True when every shard of this rank has its lease: SGLang lets them take different branches, we must not."""
        if get_parallel().attn_tp_size == 1:
            return granted
        verdict = torch.tensor([granted], dtype=torch.int32)
        torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=self._tp_group)
        return bool(verdict.item())

    def cancel_queued_load(self, rid: str) -> bool:
        self._planner.cancelled(rid)
        return self._cache.cancel(rid)

    # ---- move --------------------------------------------------------------------------------------------------

    def start_layer_wise_loading(self) -> int:
        index = self._cache.start()
        self._planner.started(index)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        copy = self._cache.moving(counter_index)
        landed = self._cache.finish(counter_index)
        if copy is not None:
            self._planner.moved(counter_index, copy, landed)
        return landed

    # ---- publish -----------------------------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Pages have entered SGLang's tree: offer them once they are complete."""
        (transfer,) = transfers
        return self._access.offload(transfer.device_indices, transfer.keys)

    def _published(self, frames: Any, keys: list[str]) -> None:
        self._cache.publish(frames, keys)
        if self._member.tier is not None:
            self._member.tier.back_up(keys, lambda: requests.grown_chains(self._page_tokens))

    def num_completed_offloads(self) -> int:
        # SGLang asks on every scheduling step.
        self._tick()
        report.tick()
        return self._access.num_completed

    def _tick(self) -> None:
        self._access.poll()
        self._cache.settle()
        self._planner.settle()
        if self._member.tier is not None:
            self._member.tier.tick()

    def pop_completed_offload(self) -> bool:
        return self._access.pop_completed()

    # ---- life --------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Leave the old weights' namespace, and meet only peers that took the same update.

        Pages that stay in SGLang's tree (an update without a flush) belong to it: they are withdrawn, not freed.

        Raises:
            RuntimeError: when a peer does not stop reading the old pages.
        """
        self._quiesce()
        self._member.leave_tier()
        self._allocator.settle()
        self._member.leave()
        self._cache.move_to(self._member.rejoin)

    def reset(self) -> None:
        # The tiers first: their copies read the pool under leases.
        self._quiesce()
        self._member.empty()
        self._cache.reset()
        self._access.forget()

    def close(self) -> None:
        self._quiesce()
        self._member.close_tier()
        self._cache.reset()
        self._member.close()

    def _quiesce(self) -> None:
        """Nothing of this rank is queued or under way any more."""
        self._cache.quiesce()
        self._access.wait_for_copies()
        self._cache.settle()

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        self.counters.control_us = self._stopwatch.elapsed_ns // 1000
        self._planner.count(self.counters)
        return self.counters

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        return {**self._member.state(), **self.counters_now().as_dict(), **self._planner.state()}

    def _labels(self) -> dict[str, str]:
        return {"dp_rank": str(self._seats.dp_rank), "tp_rank": str(get_parallel().tp_rank)}


def _check_shareable(components: set[Any], pool: Any, allocator: Any) -> None:
    """Refuse what Banyan does not know how to share."""
    if components != {ComponentType.FULL}:
        names = ", ".join(sorted(component.name for component in components))
        runtime.refuse(f"this model caches {names} state; only full attention is shared: use --banyan-share off")
    if not isinstance(pool, POOLS) or not isinstance(allocator, QuarantiningAllocator):
        runtime.refuse(pool_refusal(pool_class=type(pool).__name__, supported=("MHA", "MLA")))
    if not hasattr(pool, "banyan_geometry"):
        runtime.refuse(
            "SGLang makes this KV pool in a way of its own (quantized, or sized later): use --banyan-share off"
        )
