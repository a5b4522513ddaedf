# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt a cache can supply."""

from __future__ import annotations


def cacheable_tokens(num_tokens: int, page_tokens: int = 1) -> int:
    """Of a prompt of ``num_tokens``, in whole pages: all but the last token, which a rank computes to have something to
    sample from."""
    return max(num_tokens - 1, 0) // page_tokens * page_tokens
