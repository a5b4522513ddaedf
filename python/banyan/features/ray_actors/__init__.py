# SPDX-License-Identifier: Apache-2.0
"""Shards of a rank in actors of Ray's (``--use-ray``), in which SGLang loads no plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.feature import Asked, Parts

_ENDS = "--use-ray with {} ranks: SGLang sets its dispatcher's address too late, and ends: start a server for each rank"
_NODES = "--use-ray with --nnodes {}: actors on other nodes do not find this server's shared memory: use --nnodes 1"


def _is_asked(asked: Asked) -> bool:
    return bool(getattr(asked.args, "use_ray", False))


def refused(asked: Asked) -> list[str]:
    layout = asked.layout
    if layout is None or not _is_asked(asked) or not asked.config.shares:
        return []
    if layout.num_ranks > 1:
        return [_ENDS.format(layout.num_ranks)]
    return [_NODES.format(layout.num_nodes)] if layout.num_nodes > 1 else []


def carried(asked: Asked) -> Mapping[str, Any]:
    if not _is_asked(asked):
        return {}
    from banyan.features.ray_actors.rank.actor import Start

    return {"ray_actor": Start()}


PARTS = Parts(page="ray.md", refusals=refused, carried=carried)
