# SPDX-License-Identifier: Apache-2.0
"""What this feature registers in a rank: how the pools of such a model are taken apart."""

from __future__ import annotations

from banyan.features.states.pools.state_pool import take_apart
from banyan.sglang_plugin.rank.points import Points


def register(points: Points) -> None:
    points.kinds.append(take_apart)
