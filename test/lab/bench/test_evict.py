# SPDX-License-Identifier: Apache-2.0
"""The bench drives the real walk: leaves go, others take their place, and duplicates save looks."""

from __future__ import annotations

from collections import deque

from banyan.core import SourceKind
from banyan.planner.victims import CostShares, Leaf, Looks
from banyan_lab.bench.evict import _evict


def test_evict_when_a_walk_ends_then_what_stays_keeps_its_order_and_what_goes_comes_again():
    by_age = deque(range(40))

    def look(numbers):
        duplicates = {3: SourceKind.PEER, 7: SourceKind.PEER}
        return [Leaf(number, "", duplicates.get(number), 0.01 if number in duplicates else 1.0) for number in numbers]

    shares = CostShares(lambda kind: 0.01, lambda: 0.0)
    assert _evict(by_age, look, shares, Looks(), leaf_pages=4, num_leaves=4) > 0
    assert list(by_age)[36:] == [3, 7, 0, 1]
    assert list(by_age)[:36] == [number for number in range(40) if number not in (3, 7, 0, 1)]
