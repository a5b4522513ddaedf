# SPDX-License-Identifier: Apache-2.0
"""How large the host arena is when nobody says: from the pools, and from the memory that is free.

The arena is to hold what the pools do not, several times over, and must not cost the machine anything else: it takes a
quarter of what is free when the server starts, and where it grows with use it stops while a quarter is still free. So
two servers that start at once, or one that grows beside a busy neighbour, leave the machine its room.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan.config import GIB

GROWING_POOLS = 4
"""Times its pool that a rank's part may have where memory is taken with use only."""

COMMITTED_POOLS = 1
"""As above, where a store or NIXL takes all of it before the first request, or a GPU knows it by its pages."""

FREE_SHARE = 4
"""One part in so many of the free memory is for the arena, and as much stays free."""

LEAST_FRAMES = 16
"""Fewer hold no prefix that is worth the trouble."""


@dataclass(frozen=True, slots=True)
class AutoSize:
    """One rank's part. ``reserve_bytes`` stay free on the machine."""

    part_bytes: int
    num_parts: int
    num_pools: int
    free_bytes: int

    @property
    def reserve_bytes(self) -> int:
        return self.free_bytes // FREE_SHARE

    def line(self) -> str:
        """What the server says of it, once."""
        return (
            f"host arena of up to {self.part_bytes * self.num_parts / GIB:.2f} GiB "
            f"({self.num_parts} x {self.part_bytes / GIB:.2f}; at most {self.num_pools} x the pools and a quarter of "
            f"{self.free_bytes / GIB:.1f} GiB that are free; --banyan-host-gb GIB sets it, 0 is none)"
        )


def auto_size(*, pool_bytes: int, num_parts: int, free_bytes: int, num_pools: int) -> AutoSize:
    """The part of a rank whose pool has ``pool_bytes``, of ``num_parts`` that share the machine."""
    part_bytes = min(num_pools * pool_bytes, free_bytes // FREE_SHARE // num_parts)
    return AutoSize(part_bytes, num_parts, num_pools, free_bytes)
