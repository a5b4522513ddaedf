# SPDX-License-Identifier: Apache-2.0
"""What is held against what, and over which rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

from banyan_lab.bench.store.ours import Ceiling

CEILINGS = {"shared": "ceiling", "private": "private ceiling"}
"""What the file system gives to plain io_uring, by where its memory is: the contender's name."""

Times: TypeAlias = dict[tuple[str, str], list[float]]
"""Seconds of each round by (contender, what it did). The first rounds are those of all contenders; two that
have more had them together, one right after the other."""

Kind: TypeAlias = Callable[[str], bool]


def is_ours(name: str) -> bool:
    return name == "banyan"


def is_ceiling(name: str) -> bool:
    return name.startswith(CEILINGS["shared"])


def is_private(name: str) -> bool:
    return name.startswith(CEILINGS["private"])


def is_own_depth(name: str) -> bool:
    """The ceiling at the depth that pacing allows the store."""
    return name == f"{CEILINGS['shared']}, depth {Ceiling.write_depths[0]}"


def is_nixl(name: str) -> bool:
    return name.startswith("nixl")


def is_store(name: str) -> bool:
    return not (is_ours(name) or is_ceiling(name) or is_private(name) or is_nixl(name))


BASES: dict[str, tuple[str, str, Kind]] = {
    "layerwise_read_to_ceiling": ("layerwise_read", "layerwise_read", is_ceiling),
    "layerwise_read_to_private_ceiling": ("layerwise_read", "layerwise_read", is_private),
    "durable_write_to_ceiling": ("put", "durable_write", is_ceiling),
    "durable_write_to_ceiling_at_own_depth": ("put", "durable_write", is_own_depth),
    "durable_write_to_private_ceiling": ("put", "durable_write", is_private),
    "get_to_best_store": ("get", "get", is_store),
    "put_to_best_store": ("put", "put", is_store),
    "read_to_nixl": ("get", "get", is_nixl),
    "paced_read_share": ("read_while_writes_wait", "read_alone", is_ours),
}
"""By ratio: what Banyan did, what that is held against, and whose it was."""


def ratios(times: Times) -> dict[str, float | None]:
    """How many times as fast Banyan is as the best of the others, None where somebody is missing."""
    return {name: _ratio(times, *base) for name, base in BASES.items()}


def _ratio(times: Times, ours: str, theirs: str, whose: Kind) -> float | None:
    own = times.get(("banyan", ours), [])
    others = [seconds for (name, what), seconds in times.items() if what == theirs and whose(name)]
    return min((_paired(own, other) for other in others if own and other), default=None)


def _paired(own: Sequence[float], other: Sequence[float]) -> float:
    """The median of what each round says: a shared drive may be half as fast minutes later, or seconds. Rounds that
    only one of them took part in say nothing."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=False))
