# SPDX-License-Identifier: Apache-2.0
"""Ranks in actors of Ray's (``--use-ray``): SGLang's main process dispatches there, and its actors load no plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banyan.feature import Asked, Parts


def _is_asked(asked: Asked) -> bool:
    return bool(getattr(asked.args, "use_ray", False))


def refused(asked: Asked) -> list[str]:
    num_nodes = 1 if asked.layout is None else asked.layout.num_nodes
    if not _is_asked(asked) or not asked.config.shares or num_nodes == 1:
        return []
    return [
        f"--use-ray with --nnodes {num_nodes}: Ray's actors on other nodes do not find this server's shared memory: "
        "start one server on each node, or use --banyan-share off"
    ]


def launched(asked: Asked) -> None:
    if _is_asked(asked):
        from banyan.features.ray_actors.launcher.dispatching import dispatch_here

        dispatch_here()


def carried(asked: Asked) -> Mapping[str, Any]:
    if not _is_asked(asked):
        return {}
    from banyan.features.ray_actors.rank.start import Start

    return {"ray_actor": Start()}


PARTS = Parts(page="ray.md", refusals=refused, launched=launched, carried=carried)
