# SPDX-License-Identifier: Apache-2.0
"""How much each rank waits for from the store, and how fast it comes: what the rank has said in the rank table, for
whoever places requests."""

from __future__ import annotations

from banyan import _native
from banyan.layout import Layout


def read_queue_tokens(rank_table: _native.RankTable, layout: Layout) -> dict[int, int]:
    """Tokens whose KV each rank on this node waits for from the store, by rank. The shards of a rank read alike: the
    first one tells."""
    page_tokens = rank_table.page_tokens
    return {rank: rank_table.reading(slot) * page_tokens for rank, slot in layout.first_member_slots.items()}


def read_tokens_per_s(rank_table: _native.RankTable, layout: Layout) -> dict[int, int]:
    """Tokens that a second brings from the store, by rank, as far as the rank has measured it; else 0."""
    page_tokens = rank_table.page_tokens
    return {rank: rank_table.read_rate(slot) * page_tokens for rank, slot in layout.first_member_slots.items()}
