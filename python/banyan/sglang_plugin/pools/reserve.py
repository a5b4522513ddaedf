# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a pool on a GPU are kept free, so that no allocation waits for the forward in flight: pure.

A page that is evicted is free one forward later. With ``step_tokens`` for the largest forward, twice as many free after
an eviction are enough: one half is handed out while the other comes. Every shard of a rank counts alike.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_POOL_SHARE = 8
"""The reserve takes an eighth of the pool at most: what lies in it is no hit."""

DECODE_BATCH = 256
"""Requests of a decode batch whose largest size is not known at the start."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """``step_tokens``: what one forward may allocate."""

    step_tokens: int

    def tokens_to_have(self, num_tokens: int, available: int) -> int:
        """How many are to be available before ``num_tokens`` are allocated, given how many are."""
        if available >= num_tokens + self.step_tokens:
            return num_tokens
        return num_tokens + 2 * self.step_tokens


def reserve_for(
    *,
    chunked_prefill_tokens: int | None,
    max_prefill_tokens: int,
    max_running_requests: int | None,
    page_tokens: int,
    pool_tokens: int,
) -> Reserve:
    """For a server with these limits. A chunk size of None or below 1: prompts are not cut."""
    chunk = chunked_prefill_tokens if chunked_prefill_tokens and chunked_prefill_tokens > 0 else max_prefill_tokens
    decode = (max_running_requests or DECODE_BATCH) * page_tokens
    return Reserve(min(max(chunk, decode), pool_tokens // (2 * MAX_POOL_SHARE)))
