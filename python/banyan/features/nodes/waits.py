# SPDX-License-Identifier: Apache-2.0
"""Remote prefetches that other nodes are on for this one, and when they have been waited for long enough: pure, the
clock is the caller's.

Invariant: every remote prefetch that was begun is over once: when it is answered; when nothing was heard of it, for
`FIRST_WORD_S` at first and `SILENCE_S` later; or after `MOST_READ_S`, however alive its node is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from banyan.features.nodes.questions import PATIENCE_S, Best

FIRST_WORD_S = PATIENCE_S
SILENCE_S = 2.0
"""Longer than a pull waits for its next byte."""

MOST_READ_S = 10.0
"""As long as the own store is waited for."""


@dataclass(slots=True)
class _RemotePrefetch:
    node: int
    silent_at_s: float
    late_at_s: float


class Waits:
    """All remote prefetches of one rank's. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._remote_prefetches: dict[int, _RemotePrefetch] = {}

    def begin(self, number: int, node: int) -> None:
        now_s = self._clock()
        self._remote_prefetches[number] = _RemotePrefetch(node, now_s + FIRST_WORD_S, now_s + MOST_READ_S)

    def heard(self, number: int, node: int) -> None:
        """It is still under way."""
        remote_prefetch = self._remote_prefetches.get(number)
        if remote_prefetch is not None and remote_prefetch.node == node:
            remote_prefetch.silent_at_s = self._clock() + SILENCE_S

    def answered(self, number: int, node: int, num_pages: int) -> Best | None:
        """The node has brought so many pages; the remote prefetch's end, if it was one of this node's."""
        remote_prefetch = self._remote_prefetches.get(number)
        if remote_prefetch is None or remote_prefetch.node != node:
            return None
        del self._remote_prefetches[number]
        return Best(number, node if num_pages else -1, num_pages)

    def expire(self) -> tuple[list[Best], list[int]]:
        """End the remote prefetches whose time is over; also the nodes that have said nothing for too long."""
        now_s = self._clock()
        late, silent = [], []
        for number, remote_prefetch in list(self._remote_prefetches.items()):
            if remote_prefetch.silent_at_s <= now_s:
                silent.append(remote_prefetch.node)
            if min(remote_prefetch.silent_at_s, remote_prefetch.late_at_s) <= now_s:
                del self._remote_prefetches[number]
                late.append(Best(number, -1, 0))
        return late, silent
