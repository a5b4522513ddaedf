# SPDX-License-Identifier: Apache-2.0
"""How fast pages have been coming from the store lately, while any were wanted."""

from __future__ import annotations

KEPT_SHARE = 0.8
"""Of what earlier reads weigh, at each read that follows: the last five or so count."""


class ReadRate:
    """One rank's. Reads may overlap: the time in which several were under way counts once."""

    def __init__(self) -> None:
        self._num_pages = 0.0
        self._busy_s = 0.0
        self._until_s = 0.0

    def ended(self, began_s: float, read_s: float, num_pages: int) -> None:
        """A read of so many pages took ``read_s`` from ``began_s`` on."""
        end_s = began_s + read_s
        busy_s = max(0.0, end_s - max(began_s, self._until_s))
        self._until_s = max(self._until_s, end_s)
        self._num_pages = KEPT_SHARE * self._num_pages + num_pages
        self._busy_s = KEPT_SHARE * self._busy_s + busy_s

    @property
    def pages_per_s(self) -> int:
        """0 before the first read; after it no less than 1."""
        return max(1, round(self._num_pages / self._busy_s)) if self._num_pages and self._busy_s else 0
