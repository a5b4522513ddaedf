# SPDX-License-Identifier: Apache-2.0
"""What forwards compute and fetches move, and SGLang's tree does not show yet.

SGLang looks for a prompt's pages when it takes the prompt into a batch. So the prompts of one batch do not find each
other's pages, nor, where it makes a batch while another one is computed, those of the batch before. What two prompts
begin with would be computed twice on one rank, or moved there twice, to places of its own for each; a prompt that is
passed over once finds it.

Invariants
  1. A prompt is pending from the pass that takes it into a batch until the results of its forward are there, and no
     longer than through the next pass: nobody waits for longer than that for one that never comes.
  2. The shards of a rank answer alike: all that is asked for is SGLang's own, and the same on each.
  3. Tokens of no more prompts are kept than two batches have.

A prompt: pending -> over. The scheduler's thread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

LEAST_SHARED_TOKENS = 256
"""Fewer are computed sooner than the next pass comes: a GPU takes milliseconds for them."""

LEAST_MOVED_TOKENS = 2048
"""Fewer do not take much of the pool."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``namespace``: on what the KV of the tokens depends besides them. ``tokens``: of one array type for all."""

    namespace: Hashable
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Pending:
    prompt: Prompt
    num_tokens: int
    is_over: Callable[[], bool]

    def brings(self, asked: Prompt, first: int, last: int) -> bool:
        """Whether ``asked`` begins with its tokens up to ``last``. Those from ``first`` on are the least likely."""
        ours, theirs = self.prompt.tokens, asked.tokens
        return (
            last <= min(self.num_tokens, len(ours), len(theirs))
            and self.prompt.namespace == asked.namespace
            and ours[last - 1] == theirs[last - 1]
            # Prompts that differ mostly do so where the tree's part of them ends.
            and ours[first:last] == theirs[first:last]
            and ours[:first] == theirs[:first]
            and not self.is_over()
        )


class PendingPrompts:
    """Those of the pass that is being made, and of the one before."""

    def __init__(self) -> None:
        self._now: list[_Pending] = []
        self._before: list[_Pending] = []

    def begin_pass(self) -> None:
        """SGLang goes through its queue anew."""
        self._before, self._now = self._now, []

    def take(self, prompt: Prompt, num_tokens: int, is_over: Callable[[], bool]) -> None:
        """This pass's forward brings the pages of ``prompt`` up to ``num_tokens``; afterwards it ``is_over``."""
        if num_tokens >= LEAST_SHARED_TOKENS:
            self._now.append(_Pending(prompt, num_tokens, is_over))

    def are_computed(self, prompt: Prompt, num_found: int, most: int) -> bool:
        """Whether what comes behind the first ``num_found`` tokens, which are held somewhere, is being computed, and
        not too little to wait for. ``most``: of the prompt may come from a cache."""
        return num_found + LEAST_SHARED_TOKENS <= most and self._bring(prompt, num_found, LEAST_SHARED_TOKENS)

    def are_brought(self, prompt: Prompt, num_cached: int) -> bool:
        """Whether much of what comes behind the first ``num_cached`` tokens, which are in the pool, is being moved or
        computed."""
        return self._bring(prompt, num_cached, LEAST_MOVED_TOKENS)

    def _bring(self, prompt: Prompt, first: int, num_tokens: int) -> bool:
        return any(pending.brings(prompt, first, first + num_tokens) for pending in (*self._now, *self._before))
