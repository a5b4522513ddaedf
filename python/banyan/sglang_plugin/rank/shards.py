# SPDX-License-Identifier: Apache-2.0
"""The shards of this rank: processes that compute one batch together and must take every branch alike."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel


def are_commanded_apart() -> bool:
    """Whether a command reaches the groups of attention DP in different steps (SGLang's
    ``--enable-dp-attention-local-control-broadcast``, which elastic EP and DWDP set too): a collective of all of them
    would meet what SGLang sends between two steps."""
    parallel = get_parallel()
    return bool(parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast)


class Shards:
    """The groups over which SGLang intersects what a rank's shards can restore: attention CP, then attention TP.

    Each reduction is a collective: the shards call it for the same requests in the same order. It never leaves the
    rank, so a rank that is late keeps no other one from stepping here.
    """

    def __init__(self, params: Any) -> None:
        """``params`` are the ones that SGLang builds its tree from."""
        groups = (params.attn_cp_cache_group, params.attn_tp_cache_group)
        self._groups = [group for group in groups if group is not None and torch.distributed.get_world_size(group) > 1]
        self.is_one = not self._groups
        """Whether this process is the whole rank."""

    def all(self, granted: bool) -> bool:
        """Whether it was granted to every shard."""
        if self.is_one:
            return granted
        verdict = torch.tensor([granted], dtype=torch.int32)
        for group in self._groups:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())
