# SPDX-License-Identifier: Apache-2.0
"""All kinds of a rank's pages: full pages and, of some models, one kind beside them. They come and go together.
Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from banyan.arena.page_source import Worth
from banyan.sglang_plugin.pools.kind_pools import KindPools
from banyan.sglang_plugin.pools.quarantine import OwnPages
from banyan.sglang_plugin.rank.kind import Kind, RankSetup
from banyan.sglang_plugin.rank.tier import HostTier
from banyan.sglang_plugin.rank.window_kind import WindowKind, capped


class Kinds:
    """``full`` is what a prefix needs all of; ``beside``: of some models, what it needs the last of."""

    def __init__(self, pools: Sequence[KindPools], rank: RankSetup) -> None:
        full, *beside = pools
        self.beside = tuple(WindowKind(one, rank) for one in beside)
        self.full = Kind(full, rank)
        self._page_tokens = rank.page_tokens
        has_shards = self.full.member_slots.layout.num_shards > 1
        # Shards of a rank may have lost different states, and SGLang takes the longest length that all have.
        self._num_lengths = 2 if has_shards and any(one.is_one_slot for one in beside) else 1

    def __iter__(self) -> Iterator[Kind]:
        yield self.full
        yield from self.beside

    @property
    def wait_us(self) -> int:
        """How long allocations have waited for peers that read pages."""
        return sum(kind.pools.allocator.wait_us for kind in self)

    @property
    def node_pages(self) -> tuple[int, int]:
        """Full pages that the pools of all ranks have room for, and the arena."""
        num_ranks, tier = len(self.full.member_slots.with_peers), self.full.tier
        num_frames = 0 if tier is None else tier.state()["num_arena_frames"]
        return self.full.pools.allocator.num_pages * num_ranks, num_frames * num_ranks

    @property
    def have_tiers(self) -> bool:
        """Whether pages of any kind go below this process's pools."""
        return any(kind.tier is not None for kind in self)

    @property
    def fixed_tokens(self) -> float:
        """What a fetch brings besides, however long it is, in tokens of full pages: a state."""
        fixed_bytes = sum(kind.block.block_bytes for kind in self.beside if kind.pools.is_one_slot)
        return fixed_bytes * self._page_tokens / self.full.block.block_bytes

    def guard(self, full: OwnPages) -> None:
        """From now on what SGLang frees is withdrawn before it is handed out; of full pages by way of ``full``."""
        for kind in self.beside:
            kind.access.guard(kind.pools.allocator, kind.pages)
        self.full.access.guard(self.full.pools.allocator, full)

    # ---- requests and pages ------------------------------------------------------------------------------------

    def arrive(self, request: str, keys: list[str], worth: Worth) -> None:
        """A request for the prompt of ``keys`` has come: let the tiers below bring up what can be restored."""
        tier = self.full.tier
        if not self.beside:
            if tier is not None:
                tier.arrive(request, keys, worth)
            return
        # Full pages that another shard keeps for all of them may come as far as they go: nobody tells this one.
        most = len(keys) if tier is None else self._bring_up(tier, request, keys, worth)
        for _ in range(self._num_lengths):
            length = self._restorable(keys, most)
            for kind in self.beside:
                kind.arrive(request, keys[:length])
            most = max(0, length - 1)

    def _bring_up(self, tier: HostTier, request: str, keys: list[str], worth: Worth) -> int:
        """Full pages, as far as a length can be restored; how many this node has then, or is bringing up."""
        num_held = tier.num_on_node(keys)
        num_there = max(num_held, tier.num_stored(keys))
        tier.arrive(request, keys, capped(worth, self._restorable(keys, num_there) - num_held))
        return num_held + tier.prefetch.num_arriving(keys[num_held:])

    def demote(self, keys: Sequence[str]) -> None:
        """Of the pages of a chain those in this rank's part of the arena go next, unless they are kept."""
        for kind in self:
            if kind.tier is not None:
                # Beside full pages the end of a prefix is a chain's root (``window_kind``).
                kind.tier.residency.demote(keys if kind is self.full else keys[::-1])

    def _restorable(self, keys: Sequence[str], most: int) -> int:
        for kind in self.beside:
            most = kind.restorable(keys, most)
        return most

    def poll(self) -> None:
        """Collect what copies and I/O below the pools have finished. Never waits."""
        if self.full.tier is not None:
            self.full.tier.poll()
        for kind in self.beside:
            kind.access.poll()
            if kind.tier is not None:
                kind.tier.poll()

    # ---- life --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave all places.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        for kind in self:
            kind.leave_tier()
            kind.pools.allocator.wait_for_readers()
            kind.leave()

    def withdraw(self) -> None:
        """Forget every page below the pools, and withdraw those in them: SGLang keeps them.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self.empty()
        for kind in self:
            # What has been freed before is its own to hand out again.
            kind.pools.allocator.wait_for_readers()
            kind.withdraw()

    def empty(self) -> None:
        """Forget every page below the pools."""
        for kind in self:
            kind.empty()
