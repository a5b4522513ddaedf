# SPDX-License-Identifier: Apache-2.0
"""The bench drives the real walk: leaves go, others take their place, and duplicates save looks."""

from __future__ import annotations

from collections import deque

from banyan.core import SourceKind
from banyan.lab.bench.evict import LEAVES_IN_A_WALK, _evict
from banyan.planner.victims import CostShares, Leaf, Looks


def test_evict_when_a_walk_ends_then_what_stays_keeps_its_order_and_what_goes_comes_again():
    by_age = deque(range(40))

    def look(number):
        return Leaf(number, "", SourceKind.PEER if number in (3, 7) else None, 0.01 if number in (3, 7) else 1.0)

    _evict(by_age, look, CostShares(lambda kind: 0.01, lambda: 0.0), Looks(), leaf_pages=4)
    gone = {3, 7, 0, 1}
    assert len(gone) == LEAVES_IN_A_WALK
    assert list(by_age)[:36] == [number for number in range(40) if number not in gone]
    assert set(list(by_age)[36:]) == gone
