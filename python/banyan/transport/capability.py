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

from banyan.refusals.start import device_refusal, unshared_pool_refusal


class Route(Enum):
    DIRECT = "direct"
    STAGED = "staged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a rank finds at its start. Defaults are a GPU that can share."""

    driver_error: str | None = None
    num_unexportable_extents: int = 0
    export_error: str | None = None
    unreachable_devices: tuple[int, ...] = ()
    reads_others: bool = False
    """Whether this GPU can read some other GPU of the server's ranks."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """``line`` says why, and the way out where there is one; empty where every pool is read directly. ``apart``:
    devices whose pools are not, on the direct route."""

    route: Route
    line: str = ""
    apart: tuple[int, ...] = ()


def choose_route(facts: DeviceFacts, *, has_arena: bool) -> RouteChoice:
    """The best route that the facts allow. ``has_arena``: the server was started with a host arena."""
    if facts.driver_error is not None:
        return RouteChoice(Route.REFUSED, device_refusal(f"the CUDA driver cannot be used ({facts.driver_error})"))
    obstacle = _obstacle(facts)
    if obstacle is None and not facts.unreachable_devices:
        return RouteChoice(Route.DIRECT)
    if obstacle is None:
        obstacle = _no_access(facts.unreachable_devices)
        if has_arena and facts.reads_others:
            line = f"{obstacle}: those pages go through the host arena"
            return RouteChoice(Route.DIRECT, line, facts.unreachable_devices)
    if has_arena:
        return RouteChoice(Route.STAGED, f"{obstacle}: pages go through the host arena")
    return RouteChoice(Route.REFUSED, unshared_pool_refusal(obstacle))


def _obstacle(facts: DeviceFacts) -> str | None:
    if facts.num_unexportable_extents:
        return (
            f"{facts.num_unexportable_extents} buffers of the KV pool have no CUDA IPC handle (virtual memory: "
            "expandable segments, memory saver, post-capture sizing or a custom pool)"
        )
    if facts.export_error is not None:
        return f"the driver gives no handle of the KV pool to other processes ({facts.export_error})"
    return None


def _no_access(devices: tuple[int, ...]) -> str:
    return f"this GPU cannot read the memory of device {', '.join(map(str, devices))} (no peer access)"
