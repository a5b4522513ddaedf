# SPDX-License-Identifier: Apache-2.0
"""How a server's processes divide into ranks and shards.

A rank is what a request is sent to: it has a radix tree of its own. Its shards compute one batch together, by attention
TP and CP; each is a process with a pool, and a member slot. Replicas (``--dp N``) have TP groups of their own; under
attention data parallelism all ranks are slices of one TP group and step together.

A server over several nodes (``--nnodes``) has its processes divided evenly, in their order: a node has whole ranks, or
a part of one. Each node has a rank table of its own, with member slots for its processes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A server's division into ranks and shards, with SGLang's deprecated spellings resolved.

    Asked with every request: what follows from the fields is worked out once.
    """

    dp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int
    num_nodes: int = 1
    node: int = 0
    """The number of this node."""

    def __post_init__(self) -> None:
        if min(self.dp, self.attn_dp, self.attn_cp, self.attn_tp, self.num_nodes) < 1:
            raise ValueError(f"no layout of processes: {self.words()}")
        if self.dp > 1 and self.num_nodes > 1:
            raise ValueError(
                f"--dp {self.dp} with --nnodes {self.num_nodes}: replicas lie on one node: add --enable-dp-attention, "
                "or start one server on each node with --nnodes 1"
            )
        num_here, uneven = divmod(self.num_ranks * self.num_shards, self.num_nodes)
        if uneven or min(num_here % self.num_shards, self.num_shards % max(1, num_here)):
            raise ValueError(
                f"--nnodes {self.num_nodes}: {self.words()} do not divide into whole ranks, or equal parts of one, on "
                "each node: choose --tp-size and --dp-size so that they do"
            )
        if not 0 <= self.node < self.num_nodes:
            raise ValueError(f"--node-rank {self.node} is none of --nnodes {self.num_nodes}")

    @classmethod
    def of_flags(
        cls,
        *,
        tp_size: int,
        dp_size: int = 1,
        attn_dp_size: int = 1,
        attn_cp_size: int = 1,
        enable_dp_attention: bool = False,
        dwdp_size: int = 1,
        num_nodes: int = 1,
        node: int = 0,
    ) -> Layout:
        """From the flags as they were given, before SGLang resolves them.

        Raises:
            ValueError: for sizes that SGLang cannot divide the TP group by either.
        """
        if enable_dp_attention and attn_dp_size == 1:
            attn_dp_size, dp_size = dp_size, 1
        if dwdp_size > 1:
            attn_dp_size, dp_size = dwdp_size, 1
        shards = attn_dp_size * attn_cp_size
        if min(tp_size, dp_size, shards) < 1 or tp_size % shards:
            raise ValueError(
                f"--tp-size {tp_size} does not divide into {attn_dp_size} attention DP ranks of {attn_cp_size} "
                "attention CP shards: choose sizes whose product divides it"
            )
        return cls(
            dp=dp_size,
            attn_dp=attn_dp_size,
            attn_cp=attn_cp_size,
            attn_tp=tp_size // shards,
            num_nodes=num_nodes,
            node=node,
        )

    @property
    def num_ranks(self) -> int:
        """What a request can be sent to: SGLang's ``num_dp_ranks``."""
        return self.dp * self.attn_dp

    @property
    def num_shards(self) -> int:
        """Processes of one rank."""
        return self.attn_cp * self.attn_tp

    @cached_property
    def num_member_slots(self) -> int:
        """Processes on this node."""
        return self.num_ranks * self.num_shards // self.num_nodes

    @cached_property
    def first_process(self) -> int:
        """Of this node: so many are on the nodes before it."""
        return self.node * self.num_member_slots

    @cached_property
    def ranks_here(self) -> range:
        """The ranks that have shards on this node."""
        first = self.first_process // self.num_shards
        return range(first, first + max(1, self.num_member_slots // self.num_shards))

    @property
    def first_member_slots(self) -> dict[int, int]:
        """The member slot of each rank's first shard on this node, by rank."""
        return {rank: max(0, rank * self.num_shards - self.first_process) for rank in self.ranks_here}

    @property
    def steps_together(self) -> bool:
        """Whether a rank that waits makes all ranks wait."""
        return self.attn_dp > 1

    def shard_of(self, tp_rank: int) -> int:
        """SGLang numbers a TP group by attention DP, then CP, then TP."""
        return tp_rank % self.num_shards

    def num_slots(self, *, has_arena: bool) -> int:
        """Rank table slots: a second one for each member slot where there is a host arena."""
        return self.num_member_slots * (2 if has_arena else 1)

    @property
    def first_window_slot(self) -> int:
        """Behind those of the pools, and of the arena's parts whether there is one or not."""
        return 2 * self.num_member_slots

    @property
    def num_slots_with_windows(self) -> int:
        """Rank table slots where window pages, or states, have a pool, and a part of the arena, of their own."""
        return 2 * self.first_window_slot

    def words(self) -> str:
        """For logs and refusals."""
        kind = "attention DP ranks" if self.attn_dp > 1 else "ranks"
        words = (
            f"{self.num_ranks} {kind} of {self.num_shards} shard(s) (attention TP {self.attn_tp}, CP {self.attn_cp})"
        )
        return words if self.num_nodes == 1 else f"{words} over {self.num_nodes} nodes"
