# SPDX-License-Identifier: Apache-2.0
"""What it costs to choose the pages that leave a full pool: looks at the directory, the demand for them, the choice.

SGLang's own part, the naming of the leaves, is not here, nor what the rank adds in Python: which answers are cold, the
arena that last copies go down to, and the copies themselves. A leaf that goes makes room for another one, so the tree
stays as full as it was.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from banyan._native import Demand, FrameTable, Peers, RankTable, SharedBytes, page_numbers
from banyan.core import SourceKind
from banyan.planner.victims import CostShares, Leaf, Looks, Walk, at_once

NUM_LEAVES = 4_096
NUM_RANKS = 8
NUM_GOING = 512
NUM_ROUNDS = 21
NAMESPACE = b"b" * 32
PAGE_BYTES = 64

WANTED_PAGES = (1, 128)
"""Of a walk: a page of an answer that is being written, and a prompt's."""


def run() -> list[dict[str, Any]]:
    """One row for each length of leaf, number of pages that a walk is for and share of duplicates: medians over the
    rounds, in microseconds."""
    shares = (NUM_LEAVES + 1, NUM_LEAVES // 5, 2)
    return [_measure(*how) for how in itertools.product((1, 8, 64), WANTED_PAGES, shares)]


def _measure(leaf_pages: int, wanted_pages: int, one_in: int) -> dict[str, Any]:
    keys = [[_key(leaf, page) for page in range(leaf_pages)] for leaf in range(NUM_LEAVES)]
    duplicates = [leaf[-1] for number, leaf in enumerate(keys) if number % one_in == one_in - 1]
    rank_table = RankTable.create(NUM_RANKS)
    geometry = [[(0, PAGE_BYTES)]]
    pools = [SharedBytes.create(NUM_LEAVES * PAGE_BYTES, f"bench-{slot}") for slot in range(NUM_RANKS)]
    frame_tables = [
        FrameTable(rank_table, slot, NAMESPACE, pools[slot], NUM_LEAVES, geometry) for slot in range(1, NUM_RANKS)
    ]
    for number, frame_table in enumerate(frame_tables):
        strange = [_key(number, -1 - page) for page in range(NUM_LEAVES - len(duplicates))]
        frame_table.publish(np.arange(NUM_LEAVES), [*duplicates, *strange])
    peers = Peers(rank_table, 0, 0, NAMESPACE, geometry, pools[0])
    slots = list(range(1, NUM_RANKS))
    demand = Demand(NUM_LEAVES * leaf_pages)
    for leaf in keys:
        demand.peer_access(page_numbers(leaf))
    shares = CostShares(lambda kind: 0.01, time.monotonic)
    num_looks = 0

    def look(numbers: Sequence[int]) -> list[Leaf]:
        nonlocal num_looks
        num_looks += len(numbers)
        last = [keys[number][-1] for number in numbers]
        copies = [None if slot is None else SourceKind.PEER for slot in peers.holders(last, slots)]
        chances = demand.reuse_probabilities(page_numbers(last))
        return list(map(Leaf, numbers, last, copies, shares.reload_costs(copies, chances)))

    looks, by_age, times_us, num_gone = Looks(), deque(range(NUM_LEAVES)), [], 0
    num_leaves = -(-max(wanted_pages, at_once(NUM_LEAVES * leaf_pages)) // leaf_pages)
    for _ in range(NUM_ROUNDS):
        walks_ns = [
            _evict(by_age, look, shares, looks, leaf_pages, num_leaves) for _ in range(-(-NUM_GOING // num_leaves))
        ]
        times_us.append(sum(walks_ns) / 1000 / (len(walks_ns) * num_leaves))
        num_gone += len(walks_ns) * num_leaves
    return {
        "num_leaves": NUM_LEAVES,
        "leaf_pages": leaf_pages,
        "wanted_pages": wanted_pages,
        "leaves_in_a_walk": num_leaves,
        "duplicate_share": len(duplicates) / NUM_LEAVES,
        "num_peers": len(frame_tables),
        "looks_per_leaf": num_looks / num_gone,
        "choose_us_per_leaf": statistics.median(times_us),
        "choose_us_per_page": statistics.median(times_us) / leaf_pages,
    }


def _evict(by_age: deque[int], look: Any, shares: CostShares, looks: Looks, leaf_pages: int, num_leaves: int) -> int:
    """One walk, in nanoseconds; what goes comes again as the youngest leaf."""
    next_oldest, gone = partial(next, iter(list(by_age)), None), []
    start_ns = time.perf_counter_ns()
    shares.refresh()
    walk = Walk(next_oldest, lambda: None, look, looks, uncovers=lambda node: False)
    for _ in range(num_leaves):
        leaf = walk.choose()
        assert leaf is not None
        gone.append(leaf.node)
        looks.earn(leaf_pages)
    took_ns = time.perf_counter_ns() - start_ns
    for node in gone:
        by_age.remove(node)
    by_age.extend(gone)
    return took_ns


def _key(leaf: int, page: int) -> str:
    return hashlib.sha256(f"{leaf} {page}".encode()).hexdigest()
