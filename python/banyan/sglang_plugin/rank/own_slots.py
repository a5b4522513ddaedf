# SPDX-License-Identifier: Apache-2.0
"""Where a process sits among the ranks of its node, and what all of them have to agree on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from banyan import _native
from banyan.layout import Layout, MemberSlots
from banyan.refusals import layout_refusal
from banyan.refusals.start import disagreement_refusal, features_refusal
from banyan.sglang_plugin import runtime, seams

logger = logging.getLogger("banyan")


def member_slots_of(layout: Layout, pools: Sequence[Any]) -> MemberSlots:
    """The member slot of a process with these pools. Refuses where SGLang has resolved another layout than the rank
    table was made for."""
    parallel = get_parallel()
    resolved = Layout(
        dp=parallel.dp_size,
        attn_dp=parallel.attn_dp_size,
        attn_cp=parallel.attn_cp_size,
        attn_tp=parallel.attn_tp_size,
        num_nodes=parallel.nnodes,
        node=parallel.node_rank,
    )
    if resolved != layout:
        runtime.refuse(layout_refusal(asked=layout.words(), resolved=resolved.words()))
    # One latent for all heads: each shard of attention TP has all of it. DCP divides its tokens. Shards of CP have all
    # of it, too; each keeps its own, as where it is not latent. Where the heads of a draft are divided, a page is what
    # each shard has.
    is_replicated = (
        all(isinstance(pool, MLATokenToKVPool) or getattr(pool, "is_replicated", False) for pool in pools)
        and layout.attn_cp == 1
        and layout.attn_tp > 1
        and not parallel.dcp_enabled
    )
    return MemberSlots(layout, parallel.dp_rank or 0, layout.shard_of(parallel.tp_rank), is_replicated)


def agree_on_server(server_args: Any) -> None:
    """Take the name of the first node's server: in it the dispatcher speaks to all ranks. Refuses where another feature
    is off than in the others: there are collectives in the hooks. All of them call this at the same point of their
    start."""
    carried, group = runtime.bookkeeping(server_args), get_tp_group()
    if carried is None or group.world_size == 1:
        return
    off = ", ".join(seams.off("scheduler"))
    server = bytes.fromhex(carried["server"])
    mine = torch.frombuffer(bytearray(server + hashlib.sha256(off.encode()).digest()), dtype=torch.uint8)
    told = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(told, mine, group=group.cpu_group)
    carried["server"] = bytes(told[0][: len(server)].tolist()).hex()
    if any(not torch.equal(one[len(server) :], told[0][len(server) :]) for one in told):
        runtime.refuse(features_refusal(off=off))


def agree_on_page_tokens(rank_table: _native.RankTable, page_tokens: int, *, asked: int | None, is_first: bool) -> None:
    """Tell the dispatcher the size of a page, which SGLang may have chosen after the flags were read."""
    try:
        rank_table.agree_on_page_tokens(page_tokens)
    except ValueError as error:
        runtime.refuse(disagreement_refusal(error))
    if asked is not None and page_tokens != asked and is_first:
        logger.info("banyan: pages have %d tokens, the flags said %s", page_tokens, asked)
