# SPDX-License-Identifier: Apache-2.0
"""``/v1/loads`` says how much each rank waits for from the store, and how fast that comes: ``read_queue_tokens`` and
``read_tokens_per_s``, for routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
from sglang.srt.managers.load_snapshot import LoadSnapshot

from banyan import _native
from banyan.sglang_plugin import runtime


class Load(LoadSnapshot):
    """A rank's load, with two more numbers among its core."""

    read_queue_tokens: int = 0
    read_tokens_per_s: int = 0

    def to_dict(self, include: set[str] | None = None) -> dict[str, Any]:
        return {
            **super().to_dict(include),
            "read_queue_tokens": self.read_queue_tokens,
            "read_tokens_per_s": self.read_tokens_per_s,
        }


async def around_get_loads(
    original: Callable[..., Awaitable[list[LoadSnapshot]]], manager: Any, *args: Any, **named: Any
) -> list[LoadSnapshot]:
    loads = await original(manager, *args, **named)
    if not runtime.is_sharing():
        return loads
    carried = runtime.bookkeeping(manager.server_args)
    assert carried is not None
    rank_table, slots = rank_table_at(carried["rank_table"]), carried["layout"].first_member_slots
    return [_with_reads(load, rank_table, slots[load.dp_rank]) if load.dp_rank in slots else load for load in loads]


def _with_reads(load: LoadSnapshot, rank_table: _native.RankTable, first_shard: int) -> Load:
    """The shards of a rank read alike: the first one tells."""
    reads = {
        "read_queue_tokens": rank_table.reading(first_shard) * rank_table.page_tokens,
        "read_tokens_per_s": rank_table.read_rate(first_shard) * rank_table.page_tokens,
    }
    return Load(**msgspec.structs.asdict(load) | reads)


@cache
def rank_table_at(path: str) -> _native.RankTable:
    return _native.RankTable.open(path)
