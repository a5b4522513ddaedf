# SPDX-License-Identifier: Apache-2.0
"""This rank's places on its node: its pool's shelf, its part of the host arena, its door to the store.

Invariants
  1. All places carry one namespace: that of the weights the rank computes with.
  2. A place is left before it is taken again: a rank has one shelf in each seat and one reader bit for each view.

States: outside -> ``join`` -> joined -> ``leave_tier``, ``leave`` -> outside -> ``rejoin`` (other weights) -> joined ->
``close_tier``, ``close``. Scheduler thread only.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel, get_schedule

from banyan import _native
from banyan.arena.read_steps import layers_per_read
from banyan.arena.sizing import COMMITTED_POOLS, GROWING_POOLS, auto_size
from banyan.config import Config
from banyan.disagg import can_take_back
from banyan.layout import BlockGeometry, Layout, Namespace, Seats
from banyan.ports import OwnShelf, PageStore
from banyan.refusals import arena_room_refusal, layout_refusal
from banyan.refusals.start import disagreement_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.choose import HOST_POOLS, open_access
from banyan.sglang_plugin.pools.drafts import together
from banyan.sglang_plugin.pools.rank_device import RankDevice
from banyan.sglang_plugin.pools.reserve import reserve_for
from banyan.sglang_plugin.pools.state_pool import SharedStates
from banyan.sglang_plugin.rank import arena_memory
from banyan.sglang_plugin.rank.arena_events import ArenaEvents
from banyan.sglang_plugin.rank.identity import Identity
from banyan.sglang_plugin.rank.lookout import Lookout
from banyan.sglang_plugin.rank.nodes import NodeAccess
from banyan.sglang_plugin.rank.store_access import make_admission, open_store
from banyan.sglang_plugin.rank.tiers import HostTier, withdraw
from banyan.supply import Supply
from banyan.telemetry import Counters

logger = logging.getLogger("banyan")

Places = tuple[OwnShelf, Supply]


@dataclass(frozen=True, slots=True)
class Portion:
    """Which of a rank's pages a membership is for. A model with sliding windows, or states, has two kinds, and a rank
    of it two memberships: of its full pages, and of its window pages or states.

    ``layers`` says in words which layers a page has, where not all. ``share``: of what the flags give one rank, in the
    arena and in the store.
    """

    kind: Literal["all", "full", "window", "state"] = "all"
    layers: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def identity(self) -> tuple[str, ...]:
        """For the namespace: pages of both kinds may be equal in size."""
        return () if self.kind == "all" else (self.kind, *self.layers)

    def seats(self, seats: Seats) -> Seats:
        return seats.of_windows() if self.kind in ("window", "state") else seats

    def slots_of_a_page(self, page_tokens: int) -> int:
        """In the pool: a state is one slot, however many tokens it is of."""
        return 1 if self.kind == "state" else page_tokens


ALL_LAYERS = Portion()


class Membership:
    """One rank among the ranks of its node. ``tier`` and ``store`` are None where the flags name none."""

    def __init__(
        self,
        *,
        server_args: Any,
        config: Config,
        carried: Mapping[str, Any],
        device: RankDevice | None,
        pool: Any,
        drafts: Sequence[Any],
        page_tokens: int,
        forward_stream: Any,
        record_ready: Callable[[], list[Any]],
        counters: Counters,
        portion: Portion = ALL_LAYERS,
        arena_events: ArenaEvents | None = None,
    ) -> None:
        """``device`` is what the rank's pools share of its GPU, None where they lie on the host; ``arena_events`` tells
        routers of the arena, None where nobody listens."""
        self._server_args = server_args
        self._config = config
        self._portion = portion
        self._arena_events = arena_events
        self._num_pools = len((pool, *drafts)) + (portion.kind != "all")
        self._identity = Identity(server_args, config, server=carried["server"], pool=pool, drafts=drafts)
        shared = together(pool, drafts)
        self._pool_bytes = shared.banyan_geometry.num_bytes
        self._is_on_host = isinstance(pool, (*HOST_POOLS, SharedStates))
        self._page_tokens = page_tokens
        self._counters = counters
        self.weights_epoch = 0
        self._apart = ""
        self.seats = portion.seats(seats_of(Layout.from_dict(carried["layout"]), (pool, *drafts)))
        self.block = BlockGeometry.of_page(shared.banyan_geometry.page)
        self._page = shared.banyan_geometry.page
        self.tier: HostTier | None = None
        self.store: PageStore | None = None
        self._roster = _native.Roster.open(carried["roster"])
        self._agree_on_page_tokens()
        self.lookout = Lookout(self._roster, self.seats, page_tokens)
        self._arena = self._open_arena() if config.has_arena and self.seats.is_keeper else None
        self.access = open_access(
            device=device,
            pool=shared,
            page_tokens=portion.slots_of_a_page(page_tokens),
            config=config,
            num_slots=self.seats.layout.num_slots(has_arena=True),
            forward_stream=forward_stream,
            record_ready=record_ready,
            arena=self._arena.memory if self._arena is not None else None,
            has_arena=self._has_part,
            reserve=reserve_for(
                chunked_prefill_tokens=get_schedule().chunked_prefill_size,
                max_prefill_tokens=get_schedule().max_prefill_tokens,
                pool_tokens=pool.size,
            ),
            devices=[
                server_args.base_gpu_id + seat * server_args.gpu_id_step for seat in range(self.seats.layout.num_seats)
            ],
        )
        if not self.access.pins_arena:
            self._arena = None
        elif self._arena is not None and self.access.pins is not None:
            # A long prompt is read whole, if there are frames: they are not awaited one by one.
            ahead = self._arena.num_frames if config.reads_into_arena else arena_memory.AHEAD_STEPS
            self._arena = arena_memory.pinned(self._arena, self.access.pins, ahead_steps=ahead)
        self._nodes: NodeAccess | None = None
        if config.deals_with_nodes and self._arena is not None:
            self._nodes = NodeAccess(config, seats=self.seats, roster=self._roster, block=self.block)

    def _agree_on_page_tokens(self) -> None:
        """Tell the dispatcher the size of a page, which SGLang may have chosen after the flags were read."""
        try:
            self._roster.agree_on_page_tokens(self._page_tokens)
        except ValueError as error:
            runtime.refuse(disagreement_refusal(error))
        asked = self._server_args.page_size
        if asked is not None and self._page_tokens != asked and self.seats.own == 0:
            logger.info("banyan: pages have %d tokens, the flags said %s", self._page_tokens, asked)

    def _open_arena(self) -> arena_memory.Arena | None:
        if self._config.sizes_arena:
            return self._open_sized_arena()
        num_bytes = int(self._config.host_bytes * self._portion.share) // self.seats.num_parts
        folder = self._config.keep_host_arena
        if not folder:
            return arena_memory.allocate(num_bytes, self.block)
        return arena_memory.keep(
            Path(folder),
            self.seats.part,
            num_parts=self.seats.num_parts,
            num_bytes=num_bytes,
            block=self.block,
            namespace=self._namespace().digest(),
        )

    @property
    def share(self) -> float:
        """Of what the flags give this rank."""
        return self._portion.share

    @property
    def guards_adapters(self) -> bool:
        """Whether there may be adapters that this server alone can tell, and another one may find what it keeps or
        lends."""
        return self._config.knows_weights and bool(self._server_args.enable_lora or self._server_args.lora_paths)

    def _open_sized_arena(self) -> arena_memory.Arena | None:
        free_bytes = int((_native.available_bytes() or 0) * self._portion.share)
        # A GPU and the store's drives know the arena by its address: what they use is pinned.
        grows = self._is_on_host and not self._config.store
        size = auto_size(
            pool_bytes=self._pool_bytes,
            num_parts=self.seats.num_parts,
            free_bytes=free_bytes,
            num_pools=GROWING_POOLS if grows else COMMITTED_POOLS,
        )
        if grows:
            allocate = arena_memory.allocate_growing
        else:
            # A GPU's copies take it piece by piece; a store may read into any frame at once.
            allocate = arena_memory.allocate_whole if self._config.store else arena_memory.reserve
        arena = allocate(size, self.block)
        if arena is None and self._config.store:
            runtime.refuse(arena_room_refusal(flag="--banyan-store", free_bytes=free_bytes))
        if arena is None and self._config.deals_with_nodes:
            runtime.refuse(arena_room_refusal(flag="--banyan-listen, --banyan-peers", free_bytes=free_bytes))
        if arena is not None and self.seats.part == 0:
            logger.info("banyan: %s", size.line())
        return arena

    def sources(self) -> list[int]:
        """The seats that this rank takes pages from, the preferred first."""
        pools = self.seats.peers if self._config.fetches and self.access.shares_pool else ()
        return [*pools, *(self.seats.arenas if self._has_part else ())]

    @property
    def _has_part(self) -> bool:
        """Whether pages of this rank have a part of the arena to go to: its own, or its keeper's."""
        return self._config.has_arena and (self._arena is not None or not self.seats.is_keeper)

    def join(self) -> Places:
        """Take the places, under the namespace of the present weights."""
        namespace = self._namespace().digest()
        self._shelf, peers = self.access.join(self._roster, self.seats, namespace)
        self.lookout.joined(namespace)
        if self._config.store and self.seats.is_keeper and self.store is None:
            self.store = open_store(
                self._config,
                namespace=namespace,
                block=self.block,
                num_parts=self.seats.num_parts,
                share=self._portion.share,
            )
        elif self.store is not None:
            self.store.invalidate(namespace)
        if self._arena is None:
            return self._shelf, Supply(peers, self.sources(), None)
        self.tier = HostTier(
            roster=self._roster,
            seats=self.seats,
            namespace=namespace,
            arena=self._arena,
            peers=self.access.arena_peers(self._roster, self.seats, namespace, self.block, self._arena.memory),
            store=self.store,
            nodes=self._nodes.join(namespace, self._arena.memory) if self._nodes is not None else None,
            errands=self._nodes.errands if self._nodes is not None else None,
            admission=make_admission(self._config, num_parts=self.seats.num_parts, share=self._portion.share),
            layers_per_read=layers_per_read(self._config.store_layers_per_read, self.block.layer_bytes),
            role=runtime.role(),
            takes_back=self.takes_back,
            link_bytes_per_s=self.access.link_bytes_per_s,
            events=self._arena_events,
            counters=self._counters,
        )
        has_reads = self._config.reads_into_arena and self.follows_reads
        return self._shelf, Supply(peers, self.sources(), self.tier.prefetch if has_reads else None)

    @property
    def follows_reads(self) -> bool:
        """Whether a page is promised while it is still being read: not where others would wait for the drive as well,
        nor where only one of the rank's shards reads."""
        return self.access.follows_reads and not (self.seats.layout.steps_together or self.seats.is_replicated)

    @property
    def takes_back(self) -> bool:
        """Whether, on a decode server, the pool is filled from the arena where the prefill server would send else."""
        return can_take_back(
            runtime.role(),
            self.seats.layout,
            has_arena=self._config.has_arena,
            num_pools=self._num_pools,
            is_on_gpu=not self._is_on_host,
        )

    def rejoin(self) -> Places:
        """Take the places again, under the namespace of weights that have just changed."""
        self.weights_epoch += 1
        return self.join()

    def stand_apart(self) -> None:
        """From the next ``rejoin`` on, under a namespace that no other rank has: its weights are like nobody's."""
        self._apart = uuid.uuid4().hex

    def meet_again(self) -> None:
        """From the next ``rejoin`` on, under the namespace of those that took the same updates."""
        self._apart = ""

    def empty(self) -> None:
        """Forget every page below the pool, in the store those that this rank has written."""
        if self.tier is not None:
            self.tier.reset()
        if self.store is not None:
            try:
                self.store.clear()
            except OSError as error:
                # A rank that ends for it would lose more than a store that is late.
                logger.error("banyan: other ranks may still find what this one had stored: %s", error)

    def leave_tier(self) -> None:
        """Leave the arena: nothing of it reads the pool any more, and no peer reads it.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        if self._nodes is not None:
            self._nodes.call_in()
        if self.tier is not None:
            self.tier.leave()
            self.tier = None
        if self._nodes is not None:
            self._nodes.leave()

    def close_tier(self) -> None:
        """As ``leave_tier``, for good: nobody is waited for, and what is kept stays."""
        if self._nodes is not None:
            self._nodes.call_in()
        if self.tier is not None:
            self.tier.close()
            self.tier = None
        if self._nodes is not None:
            self._nodes.close()

    def leave(self) -> None:
        """Withdraw the pool's pages, wait until no peer reads one, and leave.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self.access.leave()
        self.withdraw()
        self._shelf.close()
        del self._shelf

    def count_failure(self) -> None:
        """Something of Banyan's has failed in this process."""
        self._roster.count_failure()

    def withdraw(self) -> None:
        """Withdraw the pool's pages, and wait until no peer reads one.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        withdraw(self._shelf)

    def close(self) -> None:
        """Leave for good; what the store had begun to write is finished."""
        if self.store is not None:
            self.store.close()
        self._shelf.close()

    def figures(self) -> dict[str, Any]:
        """What changes of this rank's places, for ``/metrics`` and ``/server_info``."""
        layout, members = self.seats.layout, self._roster.members()
        firsts = {self.seats.seat(rank, self.seats.shard) for rank in range(layout.num_ranks)}
        return {
            "num_published_pages": self._shelf.num_published,
            "num_quarantined_pages": self._shelf.num_quarantined,
            "num_ranks": layout.num_ranks,
            "num_failures": self._roster.num_failures,
            "num_silent_ranks": self._roster.num_silent,
            "num_live_ranks": sum(member["alive"] for member in members if member["slot"] in firsts),
            "peers": [member for member in members if member["slot"] in self.seats.peers],
            **(self.tier.state() if self.tier is not None else {}),
            **(self._store_figures(self.store) if self.store is not None else {}),
            **(self._nodes.state() if self._nodes is not None else {}),
        }

    def _store_figures(self, store: PageStore) -> dict[str, Any]:
        per_day = int(self._config.store_write_bytes_per_day * self._portion.share) // self.seats.num_parts
        return {"store": store.stats(), "store_write_bytes_per_day": per_day}

    def state(self) -> dict[str, Any]:
        """This rank's places, for ``/server_info``."""
        return {
            **self.figures(),
            "dp_rank": self.seats.dp_rank,
            "shard": self.seats.shard,
            "seat": self.seats.own,
            "layout": self.seats.layout.as_dict(),
            "page_tokens": self._page_tokens,
            "namespace": self._namespace().digest().hex()[:16],
            **self.access.state(),
        }

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""
        if self._nodes is not None:
            self._nodes.count(counters)

    def _namespace(self) -> Namespace:
        return self._identity.namespace(
            self._page,
            page_tokens=self._page_tokens,
            weights_epoch=self.weights_epoch,
            apart=self._apart,
            seats=self.seats,
            window=self._portion.identity,
        )


def seats_of(layout: Layout, pools: Sequence[Any]) -> Seats:
    """The seat of a process with these pools. Refuses where SGLang has resolved another layout than the roster was made
    for."""
    parallel = get_parallel()
    resolved = Layout(
        dp=parallel.dp_size, attn_dp=parallel.attn_dp_size, attn_cp=parallel.attn_cp_size, attn_tp=parallel.attn_tp_size
    )
    if resolved != layout:
        runtime.refuse(layout_refusal(asked=layout.words(), resolved=resolved.words()))
    # One latent for all heads: each shard of attention TP has all of it. CP and DCP divide its tokens. Where the heads
    # of a draft are divided, a page is what each shard has.
    is_replicated = (
        all(isinstance(pool, MLATokenToKVPool) for pool in pools)
        and layout.attn_cp == 1
        and layout.attn_tp > 1
        and not parallel.dcp_enabled
    )
    return Seats(layout, parallel.dp_rank or 0, layout.shard_of(parallel.tp_rank), is_replicated)
