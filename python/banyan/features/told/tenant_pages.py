# SPDX-License-Identifier: Apache-2.0
"""How much of one tier is kept, for whom: pure.

Invariants
  1. ``kept`` has exactly the keys that somebody keeps.
  2. No tenant is given more than ``most_of_tenant`` of them, and all together no more than ``most``.

Pages of two tenants have different keys, so each page is one tenant's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class TenantPages:
    """One tier's. ``kept`` is read elsewhere."""

    def __init__(self, kept: set[str]) -> None:
        self._kept = kept
        self._most = self.most_of_tenant = 0
        self._uses: dict[str, Counter[str]] = {}

    def bound(self, most: int, most_of_tenant: int) -> None:
        """From now on keep no more than this. What is kept stays."""
        self._most, self.most_of_tenant = most, min(most, most_of_tenant)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def num_of(self, tenant: str) -> int:
        """Pages that are kept for a tenant."""
        return len(self._uses.get(tenant, ()))

    def num_new(self, tenant: str, keys: Sequence[str]) -> int:
        """How many of a chain's pages are not kept yet. They are its last ones."""
        uses: Mapping[str, int] = self._uses.get(tenant, {})
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in uses else (low, middle)
        return len(keys) - low

    def own_room(self, tenant: str) -> int:
        """How many more pages a tenant's share has room for."""
        return self.most_of_tenant - self.num_of(tenant)

    @property
    def common_room(self) -> int:
        """How many more pages may be kept for all together."""
        return self._most - len(self._kept)

    def room(self, tenant: str) -> int:
        """How many more pages may be kept for a tenant."""
        return min(self.own_room(tenant), self.common_room)

    def keep(self, tenant: str, keys: Sequence[str]) -> list[str]:
        """Those of a chain's pages that were not kept before. They fit."""
        new = list(keys[len(keys) - self.num_new(tenant, keys) :])
        self._uses.setdefault(tenant, Counter()).update(keys)
        self._kept.update(new)
        return new

    def let_go(self, tenant: str, keys: Sequence[str]) -> list[str]:
        """A chain is kept once less. Those of its pages that are not kept any more."""
        uses = self._uses[tenant]
        uses.subtract(keys)
        gone = [key for key in keys if not uses[key]]
        for key in gone:
            del uses[key]
        if not uses:
            del self._uses[tenant]
        self._kept.difference_update(gone)
        return gone
