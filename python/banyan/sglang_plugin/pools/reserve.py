# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a pool on a GPU are kept free, so that no allocation waits for the forward in flight: pure.

A page that is evicted is free one forward later. With a step for the largest allocation to come, twice as many free
after an eviction are enough: one half is handed out while the other comes. What comes is what came: a chunk of a prompt
is as large as the server cuts it, a decode batch and a fetch from a peer are as large as those before them. (The
largest decode batch that the server would take is no measure: it is thousands of requests, each in need of a page.)

Every shard of a rank counts alike: they are asked for the same, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_POOL_SHARE = 8
"""The reserve takes an eighth of the pool at most: what lies in it is no hit."""

NUM_ASKED = 256
"""Allocations of forwards that are remembered: a few seconds of decoding."""

NUM_LOADS = 16
"""Fetches that are remembered: they come with requests, however many forwards lie between."""


@dataclass(slots=True)
class Recent:
    """The largest of the last ``num`` numbers, and of as many before them at most."""

    num: int
    _largest: int = 0
    _before: int = 0
    _seen: int = 0

    def note(self, number: int) -> None:
        if self._seen == self.num:
            self._before, self._largest, self._seen = self._largest, 0, 0
        self._largest = max(self._largest, number)
        self._seen += 1

    @property
    def largest(self) -> int:
        return max(self._largest, self._before)


@dataclass(slots=True)
class Reserve:
    """``chunk_tokens``: what is always expected; ``most_tokens``: of what is expected because it came before."""

    chunk_tokens: int
    most_tokens: int = 0
    _asked: Recent = field(default_factory=lambda: Recent(NUM_ASKED))
    _loads: Recent = field(default_factory=lambda: Recent(NUM_LOADS))

    def loaded(self, num_tokens: int) -> None:
        """So many were allocated for a fetch: SGLang evicts for it when it needs the pages, which is too late."""
        self._loads.note(num_tokens)

    @property
    def step_tokens(self) -> int:
        """What is expected to be allocated before pages that are evicted now are free."""
        came = max(self._asked.largest, self._loads.largest)
        return max(self.chunk_tokens, min(came, self.most_tokens))

    def tokens_to_have(self, num_tokens: int, available: int) -> int:
        """How many are to be available before ``num_tokens`` are allocated, given how many are."""
        self._asked.note(num_tokens)
        step_tokens = self.step_tokens
        if available >= num_tokens + step_tokens:
            return num_tokens
        return num_tokens + 2 * step_tokens


def reserve_for(*, chunked_prefill_tokens: int | None, max_prefill_tokens: int, pool_tokens: int) -> Reserve:
    """For a server with these limits, as SGLang has resolved them for this rank. A chunk size of None or below 1:
    prompts are not cut."""
    chunk = chunked_prefill_tokens if chunked_prefill_tokens and chunked_prefill_tokens > 0 else max_prefill_tokens
    most = pool_tokens // (2 * MAX_POOL_SHARE)
    return Reserve(min(chunk, most), most)
