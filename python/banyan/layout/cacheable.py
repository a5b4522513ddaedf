# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt a cache can supply."""

from __future__ import annotations


def cacheable_tokens(num_tokens: int, page_tokens: int = 1, tokens_ahead: int = 0) -> int:
    """Of a prompt of ``num_tokens``, in whole pages: all but the last token, which a rank computes to have something to
    sample from. Of what is left, ``tokens_ahead`` belong to no page: its key depends on so many tokens behind it."""
    return max(num_tokens - 1 - tokens_ahead, 0) // page_tokens * page_tokens
