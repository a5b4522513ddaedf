# SPDX-License-Identifier: Apache-2.0
"""What it costs to choose the pages that leave a full pool: looks at the directory, the demand for them, the choice.

SGLang's own part, the naming of the leaves, is not here but in the counter ``evict_us`` of a running server. A leaf
that goes makes room for another one, so the tree stays as full as it was.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import deque
from typing import Any

import numpy as np

from banyan._native import Peers, Roster, SharedBytes, Shelf, page_number, page_numbers
from banyan.core import SourceKind
from banyan.planner.demand import Demand
from banyan.planner.victims import CostShares, Leaf, Looks, Walk

NUM_LEAVES = 1_000
NUM_RANKS = 8
NUM_GOING = 500
NUM_ROUNDS = 21
LEAVES_IN_A_WALK = 4
NAMESPACE = b"b" * 32
PAGE_BYTES = 64


def run() -> list[dict[str, Any]]:
    """One row for each length of leaf and share of duplicates: medians over the rounds, in microseconds."""
    return [
        _measure(leaf_pages, one_in) for leaf_pages in (1, 8, 64) for one_in in (NUM_LEAVES + 1, NUM_LEAVES // 5, 2)
    ]


def _measure(leaf_pages: int, one_in: int) -> dict[str, Any]:
    keys = [[_key(leaf, page) for page in range(leaf_pages)] for leaf in range(NUM_LEAVES)]
    duplicates = [leaf[-1] for number, leaf in enumerate(keys) if number % one_in == one_in - 1]
    roster = Roster.create(NUM_RANKS)
    geometry = [[(0, PAGE_BYTES)]]
    pools = [SharedBytes.create(NUM_LEAVES * PAGE_BYTES, f"bench-{slot}") for slot in range(NUM_RANKS)]
    shelves = [Shelf(roster, slot, NAMESPACE, pools[slot], NUM_LEAVES, geometry) for slot in range(1, NUM_RANKS)]
    for number, shelf in enumerate(shelves):
        strange = [_key(number, -1 - page) for page in range(NUM_LEAVES - len(duplicates))]
        shelf.publish(np.arange(NUM_LEAVES), [*duplicates, *strange])
    peers = Peers(roster, 0, 0, NAMESPACE, geometry, pools[0])
    slots = list(range(1, NUM_RANKS))
    demand = Demand(NUM_LEAVES * leaf_pages)
    for number, leaf in enumerate(keys):
        demand.asked(page_numbers(leaf), number)
        demand.served(number)
    shares = CostShares(lambda kind: 0.01, time.monotonic)
    num_looks = 0

    def look(number: int) -> Leaf:
        nonlocal num_looks
        num_looks += 1
        key = keys[number][-1]
        copy = None if peers.holder(key, slots) is None else SourceKind.PEER
        return Leaf(number, key, copy, shares.of(copy) * demand.chance(page_number(key)))

    looks, by_age, times_us = Looks(), deque(range(NUM_LEAVES)), []
    for _ in range(NUM_ROUNDS):
        start_ns = time.perf_counter_ns()
        for _ in range(NUM_GOING // LEAVES_IN_A_WALK):
            _evict(by_age, look, shares, looks, leaf_pages)
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
    num_pages = NUM_GOING * leaf_pages
    return {
        "num_leaves": NUM_LEAVES,
        "leaf_pages": leaf_pages,
        "duplicate_share": len(duplicates) / NUM_LEAVES,
        "num_peers": len(shelves),
        "looks_per_leaf": num_looks / (NUM_GOING * NUM_ROUNDS),
        "choose_us_per_leaf": statistics.median(times_us) / NUM_GOING,
        "choose_us_per_page": statistics.median(times_us) / num_pages,
    }


def _evict(by_age: deque[int], look: Any, shares: CostShares, looks: Looks, leaf_pages: int) -> None:
    """One walk; what goes comes again as the youngest leaf."""
    named: list[int] = []

    def next_oldest() -> int | None:
        if not by_age:
            return None
        named.append(by_age.popleft())
        return named[-1]

    shares.refresh()
    walk, gone = Walk(next_oldest, lambda: None, look, looks, uncovers=lambda node: False), set()
    for _ in range(LEAVES_IN_A_WALK):
        leaf = walk.choose()
        assert leaf is not None
        gone.add(leaf.node)
        looks.earn(leaf_pages)
    by_age.extendleft(number for number in reversed(named) if number not in gone)
    by_age.extend(gone)


def _key(leaf: int, page: int) -> str:
    return hashlib.sha256(f"{leaf} {page}".encode()).hexdigest()
