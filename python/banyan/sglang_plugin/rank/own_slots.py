# SPDX-License-Identifier: Apache-2.0
"""Where a process sits among the ranks of its node, and what all of them have to agree on."""

from __future__ import annotations

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
from banyan.refusals.start import disagreement_refusal
from banyan.sglang_plugin import runtime

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


def take_server_id(server_args: Any) -> None:
    """Over several nodes, take the name of the first node's server: in it the dispatcher speaks to all ranks. All of
    them call this at the same point of their start."""
    carried = runtime.bookkeeping(server_args)
    if carried is None or "layout" not in carried or carried["layout"].num_nodes == 1:
        return
    group = get_tp_group()
    told = torch.tensor(list(bytes.fromhex(carried["server"])), dtype=torch.uint8)
    torch.distributed.broadcast(told, src=group.ranks[0], group=group.cpu_group)
    carried["server"] = bytes(told.tolist()).hex()


def agree_on_page_tokens(rank_table: _native.RankTable, page_tokens: int, *, asked: int | None, is_first: bool) -> None:
    """Tell the dispatcher the size of a page, which SGLang may have chosen after the flags were read."""
    try:
        rank_table.agree_on_page_tokens(page_tokens)
    except ValueError as error:
        runtime.refuse(disagreement_refusal(error))
    if asked is not None and page_tokens != asked and is_first:
        logger.info("banyan: pages have %d tokens, the flags said %s", page_tokens, asked)
