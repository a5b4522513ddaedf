# SPDX-License-Identifier: Apache-2.0
"""Chains of pages that the store refused because it does not have the page before them yet.

Prompt and answer are written by two servers, and either may be first. So an answer is offered again, with growing
pauses, for as long as its prompt can be expected.

Invariants
  1. No more than ``MAX_CHAINS`` wait; the oldest goes first.
  2. A chain is offered again no later than ``PATIENCE_S`` after it was first refused, and then forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
PATIENCE_S = 60.0
MAX_CHAINS = 1024


@dataclass(slots=True)
class _Chain:
    keys: Sequence[str]
    deadline_s: float
    due_s: float
    pause_s: float


class Orphans:
    """What waits for its parents. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._chains: deque[_Chain] = deque()
        self._num_given_up_pages = 0

    def refused(self, keys: Sequence[str]) -> None:
        """The store has just refused this chain."""
        now_s = self._clock()
        self._append(_Chain(keys, now_s + PATIENCE_S, now_s + FIRST_PAUSE_S, FIRST_PAUSE_S))

    def offer_again(self, offer: Callable[[Sequence[str]], Sequence[str]]) -> None:
        """Give every chain that is due to ``offer``; what it gives back was refused again."""
        now_s = self._clock()
        for _ in range(len(self._chains)):
            chain = self._chains.popleft()
            rest = offer(chain.keys) if chain.due_s <= now_s else chain.keys
            if rest and chain.due_s > now_s:
                self._chains.append(chain)
            elif rest and now_s >= chain.deadline_s:
                self._num_given_up_pages += len(rest)
            elif rest:
                pause_s = min(2 * chain.pause_s, MAX_PAUSE_S)
                self._append(_Chain(rest, chain.deadline_s, min(now_s + pause_s, chain.deadline_s), pause_s))

    def _append(self, chain: _Chain) -> None:
        self._chains.append(chain)
        if len(self._chains) > MAX_CHAINS:
            self._num_given_up_pages += len(self._chains.popleft().keys)

    def take_given_up(self) -> int:
        """Pages that were forgotten since the last call."""
        num_pages, self._num_given_up_pages = self._num_given_up_pages, 0
        return num_pages

    def clear(self) -> None:
        """Forget all of them: their pages are gone."""
        self._chains.clear()
