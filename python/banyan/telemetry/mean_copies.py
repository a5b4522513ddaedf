# SPDX-License-Identifier: Apache-2.0
"""How many pages were copies over the last day: the curve of that day stands on it, and one look may fall on a moment
like no other.

Each look counts as much as pages were asked for since the one before. Hours go as those of the curve do
(``reuse_distances.rs``).
"""

from __future__ import annotations

from collections import deque

from banyan.telemetry.copy_sample import Copies

HOUR_S = 3600
NUM_HOURS = 24

_NONE = Copies(0, 0, 0.0)


class MeanCopies:
    """Of the last day. ``now_s`` does not fall."""

    def __init__(self) -> None:
        self._hours: deque[tuple[int, Copies]] = deque()

    def looked(self, copies: Copies, asked_pages: int, now_s: float) -> None:
        """So many pages were asked for since the last look."""
        if not copies.num_pages:
            return
        hour = int(now_s) // HOUR_S
        before = self._hours.pop()[1] if self._hours and self._hours[-1][0] == hour else _NONE
        num_pages = before.num_pages + asked_pages
        num_duplicates = before.num_duplicates + asked_pages * copies.duplicate_share
        distinct_pages = before.distinct_pages + asked_pages * copies.distinct_share
        self._hours.append((hour, Copies(num_pages, num_duplicates, distinct_pages)))
        while self._hours[0][0] + NUM_HOURS <= hour:
            self._hours.popleft()

    def over_day(self) -> Copies:
        """Its shares are the means; its pages are those that were asked for."""
        hours = [copies for _, copies in self._hours]
        return Copies(
            sum(one.num_pages for one in hours),
            sum(one.num_duplicates for one in hours),
            sum(one.distinct_pages for one in hours),
        )
