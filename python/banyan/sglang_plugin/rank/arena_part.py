# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the host arena, for one kind of pages: how large it is, and where it comes from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from banyan import _native
from banyan.arena.sizing import COMMITTED_POOLS, GROWING_POOLS, auto_size
from banyan.config import ARENA_FOLDER
from banyan.refusals import arena_room_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import arena_memory
from banyan.sglang_plugin.rank.arena_memory import Arena

if TYPE_CHECKING:
    from banyan.sglang_plugin.rank.kind import Kind

logger = logging.getLogger("banyan")


def open_part(kind: Kind, pool_bytes: int) -> Arena | None:
    """None where the flags want none, another shard has it, or no memory is free. ``pool_bytes``: of the pool above."""
    config, member_slots, block = kind.config, kind.member_slots, kind.block
    if not (config.has_arena and member_slots.is_keeper):
        return None
    if config.sizes_arena:
        return _open_sized(kind, pool_bytes)
    num_bytes = int(config.host_bytes * kind.pools.share) // member_slots.num_parts
    if not config.keep_host_arena:
        return arena_memory.allocate(num_bytes, block)
    return arena_memory.keep(
        Path(config.keep_host_arena) / ARENA_FOLDER,
        member_slots.part,
        num_parts=member_slots.num_parts,
        num_bytes=num_bytes,
        block=block,
        namespace=kind.namespace().digest(),
    )


def _open_sized(kind: Kind, pool_bytes: int) -> Arena | None:
    config, member_slots = kind.config, kind.member_slots
    free_bytes = int((_native.available_bytes() or 0) * kind.pools.share)
    # A GPU, the store's drives and NIXL's cards know the arena by its address: what they use is pinned.
    takes_all = bool(config.store or (config.deals_with_nodes and config.nixl_plugin))
    grows = kind.is_on_host and not takes_all
    size = auto_size(
        pool_bytes=pool_bytes,
        num_parts=member_slots.num_parts,
        free_bytes=free_bytes,
        num_pools=GROWING_POOLS if grows else COMMITTED_POOLS,
    )
    # A GPU's copies take it piece by piece; a store, and another node, may read any frame at once.
    fixed = arena_memory.whole if takes_all else arena_memory.for_device
    arena = arena_memory.allocate_sized(size, kind.block, arena_memory.growing if grows else fixed)
    if arena is None and config.store:
        runtime.refuse(arena_room_refusal(flag="--banyan-store", free_bytes=free_bytes))
    if arena is None and config.deals_with_nodes:
        runtime.refuse(arena_room_refusal(flag="--banyan-listen, --banyan-peers", free_bytes=free_bytes))
    if arena is not None and member_slots.part == 0:
        logger.info("banyan: %s", size.line())
    return arena


def known_to_device(kind: Kind, arena: Arena | None) -> Arena | None:
    """The part as the way to the pool can use it; none where it does not become known."""
    if arena is None or kind.is_on_host:
        return arena
    if kind.access.pins is None:
        return None
    # A long prompt is read whole, if there are frames: they are not awaited one by one.
    ahead = arena.num_frames if kind.config.reads_into_arena else arena_memory.PINNED_AHEAD_STEPS
    return arena_memory.pinned(arena, kind.access.pins, ahead_steps=ahead)
