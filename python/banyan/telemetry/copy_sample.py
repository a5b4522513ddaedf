# SPDX-License-Identifier: Apache-2.0
"""How many of a rank's pages are the only copy, from a sample that all ranks draw alike.

A page is in the sample when its key is below a bound. Keys are hashes, so that is a fair share of the pages, and the
same pages on every rank. When the sample is full, what the rank holds no more leaves it; where that is not enough, the
bound is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_KEYS = 512
"""The share of one among so many is off by 0.02 now and then; to look them all up takes less than a millisecond."""

BOUND_DIGITS = 8
"""Of a key, its first hexadecimal digits decide; 32 halvings are more pages than a rank has."""

NO_BOUND = "g"
"""Above all keys."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Of the pages in the sample that this rank holds: in how many pools each lies, and whether in the arena."""

    num_pages: int
    num_duplicates: float
    distinct_pages: float

    @property
    def distinct_share(self) -> float:
        """Distinct pages over pages held in the pools of all ranks, as this rank sees it; 1.0 where it holds none."""
        return self.distinct_pages / self.num_pages if self.num_pages else 1.0

    @property
    def duplicate_share(self) -> float:
        """Pages of this rank that another pool or the arena holds as well."""
        return self.num_duplicates / self.num_pages if self.num_pages else 0.0


Holders = Callable[[list[str]], Iterable[tuple[bool, int, bool]]]
"""Of each page key: whether this rank's pool holds the page, how many pools do, and whether the arena does."""


class CopySample:
    """The pages of one rank that are looked up now and then. One thread."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._num_halvings = 0
        self._bound = NO_BOUND
        self._keys: set[str] = set()

    def published(self, keys: Iterable[str], holders: Holders) -> None:
        """The rank's pool holds these pages now."""
        bound = self._bound
        self._keys.update([key for key in keys if key < bound])
        if len(self._keys) <= self._max_keys:
            return
        self.look(holders)
        # With a quarter of it free it is some time until the next look.
        while len(self._keys) > self._max_keys * 3 // 4:
            self._num_halvings += 1
            self._bound = bound = f"{(1 << 4 * BOUND_DIGITS) >> self._num_halvings:0{BOUND_DIGITS}x}"
            self._keys = {key for key in self._keys if key < bound}

    def look(self, holders: Holders) -> Copies:
        """Count; what the rank does not hold any more leaves the sample."""
        num_duplicates, distinct_pages = 0, 0.0
        keys = list(self._keys)
        for key, (is_own, num_pools, is_in_arena) in zip(keys, holders(keys), strict=True):
            if not is_own:
                self._keys.discard(key)
                continue
            num_duplicates += num_pools > 1 or is_in_arena
            distinct_pages += 1 / num_pools
        return Copies(len(self._keys), num_duplicates, distinct_pages)

    def clear(self) -> None:
        """The rank holds nothing."""
        self._keys.clear()
        self._num_halvings, self._bound = 0, NO_BOUND
