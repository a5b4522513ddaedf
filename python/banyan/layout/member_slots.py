# SPDX-License-Identifier: Apache-2.0
"""Who sits where in the rank table, who has the same KV, and who keeps it.

Shard i of every rank holds the same part of a token's KV. Where KV is replicated over the shards, all of them hold all
of it, and the first shard of each rank on a node alone keeps it in that node's arena and store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from banyan.core import SourceKind
from banyan.layout.ranks import Layout


@dataclass(frozen=True)
class MemberSlots:
    """One process's view of its node's rank table: member slot ``s`` has its pool in slot ``s``, its part of the arena
    ``num_member_slots`` on.

    ``is_replicated``: every shard of a rank holds the same KV (MLA over attention TP). ``first_slot``: member slots of
    window pages, or of states, lie behind those of the others.
    """

    layout: Layout
    dp_rank: int
    shard: int
    is_replicated: bool = False
    first_slot: int = 0

    def __post_init__(self) -> None:
        number = self.own - self.first_slot
        if not (0 <= self.shard < self.layout.num_shards and 0 <= number < self.layout.num_member_slots):
            here = "" if self.layout.num_nodes == 1 else f"those of node {self.layout.node} of "
            raise ValueError(f"rank {self.dp_rank}, shard {self.shard} is not among {here}{self.layout.words()}")

    @cached_property
    def own(self) -> int:
        return self.slot(self.dp_rank, self.shard)

    @cached_property
    def own_arena(self) -> int:
        return self.layout.num_member_slots + self.own

    def slot(self, dp_rank: int, shard: int) -> int:
        """Of a process on this node."""
        return self.first_slot + dp_rank * self.layout.num_shards + shard - self.layout.first_process

    def of_windows(self) -> MemberSlots:
        """The same process's member slots for its window pages, or its states."""
        return replace(self, first_slot=self.layout.first_window_slot)

    def rank_of(self, slot: int) -> int:
        """The rank whose pool, or part of the arena, has this slot."""
        return (self.layout.first_process + slot % self.layout.num_member_slots) // self.layout.num_shards

    def kind_of(self, slot: int) -> SourceKind:
        """What the slot's pages lie in: another rank's pool, or the host arena."""
        return SourceKind.HOST if slot - self.first_slot >= self.layout.num_member_slots else SourceKind.PEER

    @property
    def is_of_first_rank(self) -> bool:
        """Whether it is a shard of this node's first rank."""
        return self.dp_rank == self.layout.ranks_here.start

    @cached_property
    def peers(self) -> Sequence[int]:
        """The pools of other ranks on this node that hold this shard's part of the KV, the next rank first, so that
        ranks which all want the same choose different sources. Shards of one rank have equal trees: none of them lacks
        what another has."""
        return [self.slot(rank, self.shard) for rank in self._ranks_from_own()[1:]]

    @cached_property
    def with_peers(self) -> Sequence[int]:
        """The pools of all ranks on this node that hold this shard's part of the KV, by rank."""
        return [self.slot(rank, self.shard) for rank in self.layout.ranks_here]

    # ---- the arena ---------------------------------------------------------------------------------------------

    @property
    def keeper(self) -> int:
        """The shard of each rank that keeps this shard's part of the KV in the node's arena and in the store."""
        if not self.is_replicated:
            return self.shard
        return max(0, self.layout.first_process - self.dp_rank * self.layout.num_shards)

    @property
    def is_keeper(self) -> bool:
        return self.shard == self.keeper

    @cached_property
    def arenas(self) -> Sequence[int]:
        """The arena's parts that hold this shard's part of the KV, that of its own rank first."""
        return [self.layout.num_member_slots + self.slot(rank, self.keeper) for rank in self._ranks_from_own()]

    @property
    def num_parts(self) -> int:
        """Into how many parts the node's arena, the store's quota and its budget of writes are divided."""
        return len(self.layout.ranks_here) if self.is_replicated else self.layout.num_member_slots

    @property
    def part(self) -> int:
        """This keeper's number among them."""
        assert self.is_keeper
        return self.layout.ranks_here.index(self.dp_rank) if self.is_replicated else self.own - self.first_slot

    def _ranks_from_own(self) -> list[int]:
        here = self.layout.ranks_here
        first = here.index(self.dp_rank)
        return [*here[first:], *here[:first]]
