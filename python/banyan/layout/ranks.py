# SPDX-License-Identifier: Apache-2.0
"""How a server's processes divide into ranks and shards.

A rank is what a request is sent to: it has a radix tree of its own. Its shards compute one batch together, by attention
TP and CP; each is a process with a pool, and a member slot. Replicas (``--dp N``) have TP groups of their own; under
attention data parallelism all ranks are slices of one TP group and step together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A server's division into ranks and shards, with SGLang's deprecated spellings resolved."""

    dp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int

    def __post_init__(self) -> None:
        if min(self.dp, self.attn_dp, self.attn_cp, self.attn_tp) < 1:
            raise ValueError(f"no layout of processes: {self.words()}")

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
        return cls(dp=dp_size, attn_dp=attn_dp_size, attn_cp=attn_cp_size, attn_tp=tp_size // shards)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        return cls(**values)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @property
    def num_ranks(self) -> int:
        """What a request can be sent to: SGLang's ``num_dp_ranks``."""
        return self.dp * self.attn_dp

    @property
    def num_shards(self) -> int:
        """Processes of one rank."""
        return self.attn_cp * self.attn_tp

    @property
    def num_member_slots(self) -> int:
        return self.num_ranks * self.num_shards

    @property
    def first_member_slots(self) -> range:
        """The member slot of each rank's first shard, by rank."""
        return range(0, self.num_member_slots, self.num_shards)

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
        return f"{self.num_ranks} {kind} of {self.num_shards} shard(s) (attention TP {self.attn_tp}, CP {self.attn_cp})"
