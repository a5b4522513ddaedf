# SPDX-License-Identifier: Apache-2.0
"""A pool in shared memory: what enters SGLang's tree is complete, and is announced at once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from banyan import _native
from banyan.layout import BlockGeometry
from banyan.layout.member_slots import MemberSlots
from banyan.ports import OwnFrameTable, Peers
from banyan.sglang_plugin.pools.access import PoolAccess, Publish, Window
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.quarantine import OwnPages, Quarantine


class HostAccess(PoolAccess):
    """A pool in shared memory. The forward runs on the calling thread: what enters the tree is complete."""

    shares_pool = True
    follows_reads = True
    num_completed = 0

    def __init__(self, pool: Any, page_tokens: int, rank_table: _native.RankTable, member_slots: MemberSlots) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._rank_table, self._member_slots = rank_table, member_slots
        self._publish: Publish | None = None
        self._allocator: Quarantine | None = None

    def attach(self, publish: Publish) -> None:
        self._publish = publish

    def guard(self, allocator: QuarantiningAllocator, pages: OwnPages) -> None:
        allocator.attach(pages)
        self._allocator = allocator

    def frames(self, slots: torch.Tensor) -> Any:
        # Torch takes microseconds for each step of this.
        return np.floor_divide(slots.numpy()[:: self._page_tokens], self._page_tokens, dtype=np.int64)

    def join(self, namespace: bytes) -> tuple[OwnFrameTable, Peers]:
        rank_table, own = self._rank_table, self._member_slots.own
        pool, geometry = self._pool.banyan_bytes, self._pool.banyan_geometry
        frame_table = _native.FrameTable(rank_table, own, namespace, pool, geometry.num_pages, geometry.table())
        # It leases only what its own lookup has found; a protocol cannot say that.
        peers = _native.Peers(rank_table, own, own, namespace, geometry.table(), pool)
        return frame_table, cast(Peers, peers)

    def arena_peers(self, namespace: bytes, block: BlockGeometry, memory: _native.SharedBytes) -> Peers:
        arena_slot = self._member_slots.own_arena
        view = _native.Peers(self._rank_table, None, arena_slot, namespace, block.table(), memory, block.frame_bytes)
        return cast(Peers, view)

    def offload(self, slots: torch.Tensor, keys: list[str], window: Window | None = None) -> bool:
        self._publish_now(slots, keys, window)
        self.num_completed += 1
        return True

    def offer_again(self, slots: torch.Tensor, keys: list[str], window: Window) -> None:
        self._publish_now(slots, keys, window)

    def _publish_now(self, slots: torch.Tensor, keys: list[str], window: Window | None) -> None:
        assert self._publish is not None
        self._publish(self.frames(slots), keys, window)

    def poll(self) -> None:
        assert self._allocator is not None
        self._allocator.poll()

    def pop_completed(self) -> bool:
        self.num_completed -= 1
        return True

    def forget(self) -> None:
        self.num_completed = 0
