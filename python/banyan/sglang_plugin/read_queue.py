# SPDX-License-Identifier: Apache-2.0
"""How much each rank waits for from the store, and how fast it comes: what the rank has said in the rank table, for
whoever places requests."""

from __future__ import annotations

from banyan import _native
from banyan.layout import Layout


def read_queue_tokens(rank_table: _native.RankTable, layout: Layout) -> list[int]:
    """Tokens whose KV each rank waits for from the store, by rank. The shards of a rank read alike: the first one
    tells."""
    page_tokens = rank_table.page_tokens
    return [rank_table.reading(member_slot) * page_tokens for member_slot in layout.first_member_slots]


def read_tokens_per_s(rank_table: _native.RankTable, layout: Layout) -> list[int]:
    """Tokens that a second brings from the store, by rank, as far as the rank has measured it; else 0."""
    page_tokens = rank_table.page_tokens
    return [rank_table.read_rate(member_slot) * page_tokens for member_slot in layout.first_member_slots]
