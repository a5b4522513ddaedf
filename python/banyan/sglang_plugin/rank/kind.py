# SPDX-License-Identifier: Apache-2.0
"""One kind of this rank's pages: its pool and what stands beside the pool for others to find the pages in. The frame
table of the pool, what is supplied by peers, the part of the host arena, the store, and other
sources.

Invariants
  1. All places carry one namespace: that of the weights the rank computes with.
  2. A place is left before it is taken again: a rank has one frame table in each member slot and one reader bit for
     each view.

States: joined (the constructor) -> ``leave_tier``, ``leave`` -> outside -> ``join`` (other weights) -> joined ->
``leave_tier`` for good, ``close``. Scheduler thread only.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from sglang.srt.runtime_context import get_schedule

from banyan import _native
from banyan.arena.window import layers_per_read
from banyan.config import Config
from banyan.layout import BlockGeometry, Namespace
from banyan.planner.answer_reuse import Answers
from banyan.ports import OwnFrameTable, PageStore
from banyan.restorable import KindPages
from banyan.sglang_plugin.pools.access import PoolAccess
from banyan.sglang_plugin.pools.drafts import together
from banyan.sglang_plugin.pools.host_access import HostAccess
from banyan.sglang_plugin.pools.kind_pools import KindPools
from banyan.sglang_plugin.pools.rank_device import RankDevice
from banyan.sglang_plugin.pools.reserve import reserve_for
from banyan.sglang_plugin.rank.arena_memory import Arena
from banyan.sglang_plugin.rank.arena_part import known_to_device, open_part
from banyan.sglang_plugin.rank.identity import Identity
from banyan.sglang_plugin.rank.own_slots import agree_on_page_tokens, member_slots_of
from banyan.sglang_plugin.rank.points import Points
from banyan.sglang_plugin.rank.reporting.arena_events import ArenaEvents
from banyan.sglang_plugin.rank.reporting.residency_report import ResidencyReport
from banyan.sglang_plugin.rank.store_access import make_admission, make_budget, open_store
from banyan.sglang_plugin.rank.tier import HostTier, TierPlace, WritableStore, withdraw
from banyan.supply import Supply
from banyan.telemetry import Counters

logger = logging.getLogger("banyan")

Places = tuple[OwnFrameTable, Supply]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What all kinds of pages of one rank share.

    Attributes:
        carried: what the main process left for the others.
        device: what the rank's pools share of its GPU; None where they lie on the host.
        record_ready: records, on a GPU, when the pages that are complete now are.
        answers: which of them nobody goes on from.
        arena_events: tells routers of the arena; None where nobody listens.
        points: what features have registered.
    """

    server_args: Any
    config: Config
    carried: Mapping[str, Any]
    device: RankDevice | None
    page_tokens: int
    forward_stream: Any
    record_ready: Callable[[], list[Any]]
    counters: Counters
    answers: Answers
    arena_events: ArenaEvents | None
    points: Points


def most_chunk_tokens() -> int:
    """No forward computes more of a prompt."""
    return max(get_schedule().chunked_prefill_size or 0, 0) or sys.maxsize


class Kind:
    """``tier`` and ``store`` are None where the flags name none."""

    def __init__(self, pools: KindPools, rank: RankSetup) -> None:
        config, args = rank.config, rank.server_args
        self.pools = pools
        self.is_on_host = rank.device is None
        self._rank = rank
        self._identity = Identity(args, config, pools, rank.carried)
        shared = together(pools.pool, pools.drafts)
        self._page = shared.banyan_geometry.page
        self.block = BlockGeometry.of_page(self._page)
        self.weights_epoch = 0
        self._changes = ""
        self._content = ""
        self._num_whole_updates = 0
        self.member_slots = pools.member_slots(member_slots_of(rank.carried["layout"], (pools.pool, *pools.drafts)))
        self.tier: HostTier | None = None
        self.store: PageStore | None = None
        self.rank_table = _native.RankTable.open(rank.carried["rank_table"])
        agree_on_page_tokens(
            self.rank_table, rank.page_tokens, asked=args.page_size, is_first=self.member_slots.own == 0
        )
        self.residency_report = ResidencyReport(self.rank_table, self.member_slots, rank.page_tokens)
        arena = open_part(self, shared.banyan_geometry.num_bytes)
        self.access = self._open_access(shared, arena)
        self._arena = known_to_device(self, arena)
        made = [make(self) for make in rank.points.sources] if self._arena is not None else []
        self._sources = [one for one in made if one is not None]
        self.pages = self._make_pages(*self.join())

    def _make_pages(self, frame_table: OwnFrameTable, supply: Supply) -> KindPages:
        return KindPages(frame_table, supply)

    def _open_access(self, shared: Any, arena: Arena | None) -> PoolAccess:
        """The way to the pool, and its drafts."""
        rank, layout = self._rank, self.member_slots.layout
        page_tokens = self.pools.slots_of_a_page(rank.page_tokens)
        if rank.device is None:
            return HostAccess(shared, page_tokens, self.rank_table, self.member_slots)
        # Imported here: it loads Triton and the driver.
        from banyan.sglang_plugin.pools.device_access import DeviceAccess

        first_device, device_step = rank.server_args.base_gpu_id, rank.server_args.gpu_id_step
        return DeviceAccess(
            device=rank.device,
            pool=shared,
            page_tokens=page_tokens,
            rank_table=self.rank_table,
            member_slots=self.member_slots,
            config=rank.config,
            num_slots=layout.num_slots(has_arena=True),
            forward_stream=rank.forward_stream,
            record_ready=rank.record_ready,
            arena=arena.memory if arena is not None else None,
            has_arena=self._has_part(arena),
            reserve=reserve_for(
                chunked_prefill_tokens=get_schedule().chunked_prefill_size,
                max_prefill_tokens=get_schedule().max_prefill_tokens,
                pool_tokens=self.pools.pool.size,
            ),
            devices=[first_device + member_slot * device_step for member_slot in range(layout.num_member_slots)],
        )

    # ---- what is asked of it -----------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self._rank.config

    @property
    def num_kv_heads(self) -> int:
        """Of the model, over all shards; 0 where that is not known."""
        return int(self._rank.carried.get("num_kv_heads", 0))

    @property
    def weights_name(self) -> str:
        """By what the other server of a pair knows whether it computes the same, with weights, adapters and flags; ""
        where pages need no such name, or nobody knows it."""
        weights = self._content or ("" if self._changes else self._identity.weights_sha256)
        return self._identity.computing(weights) if weights else ""

    @cached_property
    def guards_adapters(self) -> bool:
        """Whether there may be adapters that this server alone can tell, and another one may find what it keeps or
        lends."""
        args = self._rank.server_args
        return self.config.knows_weights and bool(args.enable_lora or args.lora_paths)

    @property
    def may_write_back(self) -> bool:
        """Whether pages need not lie in the arena before they leave the pool: who wants them finds them here. Not where
        ranks step together: what is on its way down is not free for a decode. Nor with shares of tenants: whose a page
        is, is not remembered for as long as it lies in the pool."""
        config, members, tier = self.config, self.member_slots, self.tier
        if tier is None or tier.wants_all or config.deals_with_nodes or config.tenant_share is not None:
            return False
        if members.layout.steps_together:
            return False
        return not members.peers or (config.fetches and self.access.all_read_pool)

    @property
    def follows_reads(self) -> bool:
        """Whether a page is promised while it is still being read: not where others would wait for the drive as well,
        nor where only one of the rank's shards reads."""
        return self.access.follows_reads and not (
            self.member_slots.layout.steps_together or self.member_slots.is_replicated
        )

    def sources(self) -> list[int]:
        """The member slots that this rank takes pages from, the preferred first."""
        pools = self.member_slots.peers if self.config.fetches and self.access.shares_pool else ()
        return [*pools, *(self.member_slots.arenas if self._has_part(self._arena) else ())]

    @property
    def most_arena_frames(self) -> int:
        """That this rank's part of the arena may come to have, whichever shard keeps it: of one that grows, not all
        have memory now."""
        if self.member_slots.is_keeper:
            return 0 if self._arena is None else self._arena.num_frames
        members, keeper = self.rank_table.members(), self.member_slots.arenas[0]
        return sum(member["num_frames"] for member in members if member["slot"] == keeper)

    def _has_part(self, arena: Arena | None) -> bool:
        """Whether pages of this rank have a part of the arena to go to: its own, or its keeper's."""
        return self.config.has_arena and (arena is not None or not self.member_slots.is_keeper)

    def is_awaited(self, request: str) -> bool:
        """Whether somebody who was asked for the request's prompt may still answer."""
        return self.tier is not None and self.tier.is_awaited(request)

    # ---- places ------------------------------------------------------------------------------------------------

    def join(self) -> Places:
        """Take the places, at first or again, under the namespace of the present weights."""
        config, pools, namespace = self.config, self.pools, self._namespace_digest()
        frame_table, peers = self.access.join(namespace)
        self.residency_report.joined(namespace)
        num_parts = self.member_slots.num_parts
        if config.store and self.member_slots.is_keeper and self.store is None:
            self.store = open_store(
                config, namespace=namespace, block=self.block, num_parts=num_parts, share=pools.share
            )
            self._budget = make_budget(config, num_parts=num_parts, share=pools.share)
            self._rank.points.owners.opened(self.store)
        elif self.store is not None:
            self.store.invalidate(namespace)
        if self._arena is None:
            return frame_table, Supply(peers, self.sources(), None)
        writable = None
        if self.store is not None:
            writable = WritableStore(self.store, make_admission(config, self._budget))
        place = TierPlace(
            rank_table=self.rank_table,
            member_slots=self.member_slots,
            namespace=namespace,
            arena=self._arena,
            peers=self.access.arena_peers(namespace, self.block, self._arena.memory),
            layers_per_read=layers_per_read(config.store_layers_per_read, self.block.layer_bytes),
            link_bytes_per_s=self.access.link_bytes_per_s,
            counters=self._rank.counters,
            kept=self._rank.points.kept,
            cold=self._rank.answers.cold,
            owners=self._rank.points.owners,
        )
        partner = self._rank.points.partner(self)
        self.tier = HostTier(place, writable, partner, self._sources, self._rank.arena_events)
        has_reads = config.reads_into_arena and self.follows_reads
        return frame_table, Supply(peers, self.sources(), self.tier.prefetch if has_reads else None)

    def note_change(self, change: str) -> None:
        """From the next ``join`` on, under a namespace of those whose weights have gone through the same, one by one.
        Their number would not do: a rank may take an update that another one has not heard of."""
        self._changes = hashlib.sha256(f"{self._changes} {change}".encode()).hexdigest()
        self._content = ""
        # Last: other threads read the number and then the name, and a new number is not to be seen with an old name.
        self.weights_epoch += 1

    def note_content(self, digest: str) -> None:
        """From the next ``join`` on, under a namespace of those whose weights, which have changed, have this digest,
        whatever they have gone through."""
        self._content = digest
        self.weights_epoch += 1

    def meet_again(self) -> None:
        """All weights are about to be loaded: what they have gone through before is nothing to the next ``join``.
        Every rank hears of each such update, whatever comes of it."""
        self._num_whole_updates += 1
        self._changes = f"{self._num_whole_updates} whole"

    def empty(self) -> None:
        """Forget every page below the pool, in the store those that this rank has written."""
        if self.store is not None:
            try:
                # Before the tier waits for its writes: what is queued would be written to be removed.
                self.store.clear()
            except OSError as error:
                # A rank that ends for it would lose more than a store that is late.
                logger.error("banyan: other ranks may still find what this one had stored: %s", error)
        if self.tier is not None:
            self.tier.reset()

    def leave_tier(self, *, for_good: bool = False) -> None:
        """Leave the arena: nothing of it reads the pool any more, and no peer reads it. ``for_good``: nobody is waited
        for, and what is kept stays.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        for access in self._sources:
            access.call_in()
        if self.tier is not None:
            (self.tier.close if for_good else self.tier.leave)()
            self.tier = None
        for access in self._sources:
            (access.close if for_good else access.leave)()

    def leave(self) -> None:
        """Withdraw the pool's pages, wait until no peer reads one, and leave.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self.access.leave()
        self.withdraw()
        self.pages.frame_table.close()

    def withdraw(self) -> None:
        """Withdraw the pool's pages, and wait until no peer reads one.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        withdraw(self.pages.frame_table)

    def close(self) -> None:
        """Leave for good; what the store had begun to write is finished."""
        if self.store is not None:
            self.store.close()
        self.pages.frame_table.close()

    # ---- what it tells -----------------------------------------------------------------------------------------

    def count_failure(self) -> None:
        """Something of Banyan's has failed in this process."""
        self.rank_table.count_failure()

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""
        for access in self._sources:
            access.count(counters)

    def figures(self) -> dict[str, Any]:
        """What changes of this kind's places, for ``/metrics`` and ``/server_info``."""
        members, pools = self.rank_table.members(), self.member_slots.with_peers
        figures = {
            "num_published_pages": self.pages.frame_table.num_published,
            "num_quarantined_pages": self.pages.frame_table.num_quarantined,
            "num_ranks": len(pools),
            "num_failures": self.rank_table.num_failures,
            "num_live_ranks": sum(member["alive"] for member in members if member["slot"] in pools),
            "peers": [member for member in members if member["slot"] in self.member_slots.peers],
            **(self.tier.state() if self.tier is not None else {}),
        }
        for access in self._sources:
            figures |= access.state()
        return figures

    def store_figures(self) -> dict[str, Any]:
        """What changes of its store; nothing without one."""
        if self.store is None:
            return {}
        per_day = int(self.config.store_write_bytes_per_day * self.pools.share) // self.member_slots.num_parts
        stats = Counter(self.store.stats())
        for access in self._sources:
            stats.update(access.store_troubles())
        return {"store": dict(stats), "store_write_bytes_per_day": per_day}

    def state(self) -> dict[str, Any]:
        """This kind's places, for ``/server_info``."""
        return {
            **self.figures(),
            # The dispatcher shows it in /metrics: a rank that stands still shows nothing.
            "num_silent_ranks": self.rank_table.num_silent,
            "dp_rank": self.member_slots.dp_rank,
            "shard": self.member_slots.shard,
            "member_slot": self.member_slots.own,
            "layout": asdict(self.member_slots.layout),
            "page_tokens": self._rank.page_tokens,
            "namespace": self._namespace_digest().hex()[:16],
            **self.access.state(),
        }

    def _namespace_digest(self) -> bytes:
        return self.namespace().digest()

    def namespace(self) -> Namespace:
        """Of the present weights."""
        return self._identity.namespace(
            self._page,
            page_tokens=self._rank.page_tokens,
            changes=self._changes,
            content=self._content,
            member_slots=self.member_slots,
        )
