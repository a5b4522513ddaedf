# SPDX-License-Identifier: Apache-2.0
"""How many of the pages that the pools of a node hold are copies of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from banyan_lab.sim.tree import Page, Tree


def distinct_share(trees: Sequence[Tree], holders: Mapping[Page, int]) -> float:
    """Distinct pages over all pages held. ``holders``: a bit for each rank that holds a page."""
    num_held = sum(map(len, trees))
    return sum(1 for ranks in holders.values() if ranks) / num_held if num_held else 1.0


def spare_share(trees: Sequence[Tree], holders: Mapping[Page, int]) -> float:
    """Of all pages held, the copies that could go at once and nothing would be lost: what better eviction could still
    get. A copy that a request uses could not, nor one behind which its rank alone holds something."""
    num_held = sum(map(len, trees))
    num_spare: dict[Page, int] = {}
    for rank, tree in enumerate(trees):
        for page in tree.spare(lambda page, own=1 << rank: holders[page] & ~own != 0):
            num_spare[page] = num_spare.get(page, 0) + 1
    # One copy of each stays.
    num_gone = sum(min(number, holders[page].bit_count() - 1) for page, number in num_spare.items())
    return num_gone / num_held if num_held else 0.0


def most_distinct_share(prompts: Sequence[Sequence[Page]], num_ranks: int, total_pages: int) -> float:
    """What the distinct share of full pools can be at most, where every rank serves prompts: each then holds what all
    prompts begin with."""
    # What the first and the last in the order have in common, all between them have too.
    first, last = min(prompts), max(prompts)
    num_common = sum(1 for _ in takewhile(lambda pages: pages[0] == pages[1], zip(first, last, strict=False)))
    return 1.0 - (num_ranks - 1) * num_common / total_pages
