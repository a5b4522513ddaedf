# SPDX-License-Identifier: Apache-2.0
"""Where pages lie, for people: who holds the last prompts of this rank, and how many of its pages are copies.

It reads the directory, leases nothing and touches nothing: to look must not change what is evicted next. Of the store
nothing is asked, for there a lookup is a use. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from banyan import _native
from banyan.core import rid_of
from banyan.layout import MemberSlots
from banyan.telemetry import Copies, CopySample, Holding, MeanCopies, RecentPrompts

COUNT_PERIOD_S = 5.0
"""Between two counts: one takes half a millisecond."""


class ResidencyReport:
    """One rank's. ``joined`` is called before anything else, and again under another namespace."""

    def __init__(self, rank_table: _native.RankTable, member_slots: MemberSlots, page_tokens: int) -> None:
        self._rank_table = rank_table
        self._member_slots = member_slots
        self._prompts = RecentPrompts(page_tokens)
        self._sample = CopySample()
        self._pools = member_slots.with_peers
        self._view: _native.Peers
        self._copies = Copies(0, 0, 0.0)
        self._mean_copies = MeanCopies()
        self._asked_pages = 0
        """Since the last count."""
        self._counts_again_s = 0.0

    def joined(self, namespace: bytes) -> None:
        """The rank's pages have this namespace from now on; there are none yet."""
        self._view = _native.Peers(self._rank_table, None, 0, namespace, [], None)
        self._sample.clear()
        self._mean_copies = MeanCopies()

    def asked(self, num_pages: int) -> None:
        """A request has come with a prompt of so many pages."""
        self._asked_pages += num_pages
        self.copies(time.monotonic())

    def saw(self, request: str, keys: Sequence[str]) -> None:
        """A request has come with a prompt of these pages."""
        self._prompts.saw(rid_of(request), keys, time.time())

    def published(self, keys: Sequence[str]) -> None:
        """This rank's pool holds these pages."""
        self._sample.published(keys, self._holders)

    def copies(self, now_s: float) -> Copies:
        """How many pages are copies, counted anew every ``COUNT_PERIOD_S``. ``now_s``: monotonic."""
        if now_s >= self._counts_again_s:
            self._counts_again_s = now_s + COUNT_PERIOD_S
            self._copies = self._sample.look(self._holders)
            self._mean_copies.looked(self._copies, self._asked_pages, now_s)
            self._asked_pages = 0
        return self._copies

    def mean_copies(self, now_s: float) -> Copies:
        """The same over the last day, by the pages that were asked for meanwhile."""
        self.copies(now_s)
        return self._mean_copies.over_day()

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        copies = self._sample.look(self._holders)
        return {
            "prompts": self._prompts.state(self._holding),
            "distinct_share": round(copies.distinct_share, 4),
            "duplicate_share": round(copies.duplicate_share, 4),
            "num_sampled_pages": copies.num_pages,
        }

    def _holders(self, keys: list[str]) -> Iterator[tuple[bool, int, bool]]:
        own, arenas, *pools = (
            self._view.holders(keys, slots)
            for slots in ([self._member_slots.own], self._member_slots.arenas, *([slot] for slot in self._pools))
        )
        for is_own, in_arena, *by_pool in zip(own, arenas, *pools, strict=True):
            yield is_own is not None, sum(one is not None for one in by_pool), in_arena is not None

    def _holding(self, keys: list[str]) -> Holding:
        held = self._view.prefix_lens(keys)
        # A prompt's pages may lie in several parts of the arena: together they hold as many as were found in turn.
        arenas = self._arenas(held)
        in_arena = self._view.lookup(keys, arenas).num_pages if arenas else 0
        # Of ranks on other nodes nobody here knows.
        elsewhere = [0] * self._member_slots.layout.ranks_here.start
        return Holding([*elsewhere, *(held[slot] for slot in self._pools)], in_arena)

    def _arenas(self, held: Sequence[int]) -> list[int]:
        """The slots of the arena's parts; a rank table without an arena ends before them."""
        return [slot for slot in self._member_slots.arenas if slot < len(held)]
