# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the host arena, for one kind of pages: how large it is, and where it comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from banyan import _native
from banyan.arena.sizing import COMMITTED_POOLS, GROWING_POOLS, auto_size
from banyan.config import ARENA_FOLDER, Config
from banyan.layout import BlockGeometry, MemberSlots
from banyan.refusals import arena_room_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.access import PoolAccess
from banyan.sglang_plugin.rank import arena_memory
from banyan.sglang_plugin.rank.arena_memory import Arena

logger = logging.getLogger("banyan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPart:
    """What the size of a part depends on. ``share``: of what the flags give a rank."""

    config: Config
    member_slots: MemberSlots
    block: BlockGeometry
    share: float
    pool_bytes: int
    is_on_host: bool

    def open(self, namespace: Callable[[], bytes]) -> Arena | None:
        """None where the flags want none, another shard has it, or no memory is free. ``namespace``: of what is kept
        in it."""
        if not (self.config.has_arena and self.member_slots.is_keeper):
            return None
        if self.config.sizes_arena:
            return self._open_sized()
        num_bytes = int(self.config.host_bytes * self.share) // self.member_slots.num_parts
        folder = self.config.keep_host_arena
        if not folder:
            return arena_memory.allocate(num_bytes, self.block)
        return arena_memory.keep(
            Path(folder) / ARENA_FOLDER,
            self.member_slots.part,
            num_parts=self.member_slots.num_parts,
            num_bytes=num_bytes,
            block=self.block,
            namespace=namespace(),
        )

    def _open_sized(self) -> Arena | None:
        free_bytes = int((_native.available_bytes() or 0) * self.share)
        # A GPU, the store's drives and NIXL's cards know the arena by its address: what they use is pinned.
        takes_all = bool(self.config.store or (self.config.deals_with_nodes and self.config.nixl_plugin))
        grows = self.is_on_host and not takes_all
        size = auto_size(
            pool_bytes=self.pool_bytes,
            num_parts=self.member_slots.num_parts,
            free_bytes=free_bytes,
            num_pools=GROWING_POOLS if grows else COMMITTED_POOLS,
        )
        # A GPU's copies take it piece by piece; a store, and another node, may read any frame at once.
        fixed = arena_memory.whole if takes_all else arena_memory.for_device
        arena = arena_memory.allocate_sized(size, self.block, arena_memory.growing if grows else fixed)
        if arena is None and self.config.store:
            runtime.refuse(arena_room_refusal(flag="--banyan-store", free_bytes=free_bytes))
        if arena is None and self.config.deals_with_nodes:
            runtime.refuse(arena_room_refusal(flag="--banyan-listen, --banyan-peers", free_bytes=free_bytes))
        if arena is not None and self.member_slots.part == 0:
            logger.info("banyan: %s", size.line())
        return arena

    def known_to(self, access: PoolAccess, arena: Arena | None) -> Arena | None:
        """The part as the way to the pool can use it."""
        if not access.pins_arena:
            return None
        if arena is None or access.pins is None:
            return arena
        # A long prompt is read whole, if there are frames: they are not awaited one by one.
        ahead = arena.num_frames if self.config.reads_into_arena else arena_memory.PINNED_AHEAD_STEPS
        return arena_memory.pinned(arena, access.pins, ahead_steps=ahead)
