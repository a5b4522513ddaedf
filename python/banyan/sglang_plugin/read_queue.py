# SPDX-License-Identifier: Apache-2.0
"""How much each rank waits for from the store, and how fast it comes: what the rank has said in the roster, for whoever
places requests."""

from __future__ import annotations

from banyan import _native
from banyan.layout import Layout


def read_queue_tokens(roster: _native.Roster, layout: Layout) -> list[int]:
    """Tokens whose KV each rank waits for from the store, by rank. The shards of a rank read alike: the first one
    tells."""
    page_tokens = roster.page_tokens
    return [roster.reading(member_slot) * page_tokens for member_slot in layout.first_member_slots]


def read_tokens_per_s(roster: _native.Roster, layout: Layout) -> list[int]:
    """Tokens that a second brings from the store, by rank, as far as the rank has measured it; else 0."""
    page_tokens = roster.page_tokens
    return [roster.read_rate(member_slot) * page_tokens for member_slot in layout.first_member_slots]
