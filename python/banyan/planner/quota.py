# SPDX-License-Identifier: Apache-2.0
"""The compute quota of one prefill forward: first come, first packed; who would exceed it is cut into chunks.

A forward is filled in the order of the queue (after "DualPath", compute quota). The first request always gets a page,
so that the smallest quota still makes progress; the request that does not fit whole gets what fits and ends the batch.
"""

from __future__ import annotations

from banyan.planner.prefill_cost import Piece
from banyan.planner.prefill_times import PrefillTimes


class QuotaMeter:
    """What one forward has taken so far. Made anew for each forward."""

    def __init__(self, times: PrefillTimes, *, quota_us: float, page_tokens: int) -> None:
        self._times = times
        self._quota_us = quota_us
        self._page_tokens = page_tokens
        self._pieces: list[Piece] = []
        self.is_spent = False

    def allow(self, prefix_tokens: int, wanted_tokens: int) -> int:
        """How many of ``wanted_tokens`` new ones this forward may compute: all, or whole pages, or none.

        Anything but all of them spends the quota: nobody else joins this forward.
        """
        fitting = self._times.largest_extend(
            prefix_tokens, quota_us=self._quota_us, taken=self._pieces, at_most=wanted_tokens
        )
        if fitting >= wanted_tokens:
            return wanted_tokens
        self.is_spent = True
        pages = fitting // self._page_tokens
        if not self._pieces:
            pages = max(1, pages)
        allowed = min(wanted_tokens, pages * self._page_tokens)
        # A chunk of one token would round differently from the same token among others: it goes along.
        return wanted_tokens if allowed and wanted_tokens - allowed == 1 else allowed

    def take(self, piece: Piece) -> None:
        """Count what a request computes in this forward."""
        self._pieces.append(piece)
