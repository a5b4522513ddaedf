# SPDX-License-Identifier: Apache-2.0
"""Requests of a rank for which somebody else is asked or reads: they keep their place, and others go on.

Invariants
  1. Nobody waits here. A rank of several shards asks without waiting: they would have to agree on when to go on.
  2. What a router has said about who reads holds when the request comes, and for one more time when something is
     missing at its turn. After that this rank reads: a request does not wait over and over.

A request: come -> sent for -> answered; at its turn, if pages have left: sent for -> answered -> read here. Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from banyan.arena.prefetch import Worth
from banyan.routing.hint import ReadHint
from banyan.sglang_plugin.rank import prefill, requests
from banyan.sglang_plugin.rank.planning import RankPlanner
from banyan.sglang_plugin.rank.tiers import HostTier


class ReadElsewhere:
    """One rank's. ``tier``: what it has of arena, store and other nodes now."""

    def __init__(
        self, tier: Callable[[], HostTier | None], planner: RankPlanner, page_tokens: int, *, can_wait: bool
    ) -> None:
        self.can_wait = can_wait
        self._tier = tier
        self._planner = planner
        self._page_tokens = page_tokens
        if can_wait:
            prefill.hold_back(self.is_awaited)

    def reads_of(self, request: str) -> ReadHint | None:
        """Who is to read what of the request's prompt, where that can be waited for."""
        return requests.reads_of(request) if self.can_wait else None

    def is_awaited(self, request: str) -> bool:
        """Whether somebody who was asked for the request's prompt may still answer."""
        tier = self._tier()
        return tier is not None and tier.is_awaited(request)

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for the request."""
        tier = self._tier()
        return tier is not None and tier.is_sent_for(request)

    def send_for(self, request: str) -> bool:
        """For a request of whose prompt something is missing, and all may have been here when it came: whether another
        node reads it, or this one has just begun to, as a router has said."""
        tier, reads = self._tier(), self.reads_of(request)
        if tier is None or reads is None or tier.is_sent_for(request):
            return self.is_sent_for(request)
        keys = requests.prompt_keys(request, self._page_tokens)
        worth: Worth = partial(self._planner.num_to_read, requests.facts_of_all_pages(request, self._page_tokens))
        is_heard = bool(keys) and tier.send_for(request, keys or (), worth, reads)
        if is_heard:
            requests.forget_reads(request)
        return is_heard
