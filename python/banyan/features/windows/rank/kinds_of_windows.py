# SPDX-License-Identifier: Apache-2.0
"""What this feature registers in a rank: how the pools of such a model are taken apart."""

from __future__ import annotations

from banyan.features.windows.pools import compressed_pool, two_pools
from banyan.sglang_plugin.rank.points import Points


def register(points: Points) -> None:
    points.kinds += (two_pools.take_apart, compressed_pool.take_apart)
