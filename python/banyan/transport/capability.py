# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a GPU server can read each other's pools, and what happens where they cannot: pure.

"Direct": over CUDA IPC. "Staged": pages go down to the host arena and come up again, which every rank can reach.
"Refused": the server does not start, with the way out. Never silently off: who asked for sharing gets it or a reason.
Where a GPU reads some of the others (two halves of a machine, each behind a switch of its own), it reads those directly
and the rest through the arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from banyan.refusals.start import unshared_pool_refusal


class Route(Enum):
    DIRECT = "direct"
    STAGED = "staged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """``line`` says why, and the way out where there is one; empty where every pool is read directly. ``apart``:
    devices whose pools are not, on the direct route."""

    route: Route
    line: str = ""
    apart: tuple[int, ...] = ()


def choose_route(
    export_obstacle: str, unreachable_devices: tuple[int, ...], *, reads_others: bool, has_arena: bool
) -> RouteChoice:
    """The best route that there is.

    Args:
        export_obstacle: why the pool has no handles that others could open; empty where it has.
        unreachable_devices: those of the server's ranks that this GPU cannot read; ``reads_others``: some others it
            can.
        has_arena: the server was started with a host arena.
    """
    obstacle = export_obstacle
    if not obstacle and not unreachable_devices:
        return RouteChoice(Route.DIRECT)
    if not obstacle:
        devices = ", ".join(map(str, unreachable_devices))
        obstacle = f"this GPU cannot read the memory of device {devices} (no peer access)"
        if has_arena and reads_others:
            line = f"{obstacle}: those pages go through the host arena"
            return RouteChoice(Route.DIRECT, line, unreachable_devices)
    if has_arena:
        return RouteChoice(Route.STAGED, f"{obstacle}: pages go through the host arena")
    return RouteChoice(Route.REFUSED, unshared_pool_refusal(obstacle))
