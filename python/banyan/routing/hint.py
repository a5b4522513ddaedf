# SPDX-License-Identifier: Apache-2.0
"""The prefix hint: what the dispatcher saw in the directory, carried to the rank in SGLang's ``kv_hints``.

A hint is advice. The rank looks again before it promises anything, because pages may have moved meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ACTION_TYPE = "banyan.prefix"
ACTION_VERSION = "1"


@dataclass(frozen=True, slots=True)
class PrefixHint:
    """The longest cached prefix over all ranks at dispatch, in tokens, and its holder (-1: nobody)."""

    max_tokens: int
    max_rank: int

    @classmethod
    def from_pages_by_rank(cls, pages_by_rank: Sequence[int], page_tokens: int) -> PrefixHint:
        """Pick the holder of the longest prefix; the lowest rank wins a tie."""
        longest = max(pages_by_rank, default=0)
        if longest == 0:
            return cls(0, -1)
        return cls(longest * page_tokens, list(pages_by_rank).index(longest))

    def payload(self) -> dict[str, int]:
        return {"dp_max_kv_len": self.max_tokens, "dp_max_kv_rank": self.max_rank}

    @classmethod
    def from_payload(cls, payload: Mapping[str, object]) -> PrefixHint | None:
        """Read a payload that crossed a process border; None when it is not one of ours."""
        tokens, rank = payload.get("dp_max_kv_len"), payload.get("dp_max_kv_rank")
        if not isinstance(tokens, int) or not isinstance(rank, int) or tokens < 0:
            return None
        return cls(tokens, rank)
