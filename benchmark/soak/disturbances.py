# SPDX-License-Identifier: Apache-2.0
"""What happens to a server now and then while it is asked: commands to all ranks, ranks that stand still, crowds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.processes import send
from benchmark.soak import traffic
from benchmark.soak.asking import Client

SCHEDULER = "sglang::scheduler"
CROWD = 40
FLUSH_TIMEOUT_S = 60


@dataclass
class Grounds:
    """What a disturbance works on. `open`: whether new requests may be sent."""

    client: Client
    model: Path
    schedulers: list[int]
    open: asyncio.Event = field(default_factory=asyncio.Event)


Disturbance = Callable[[Grounds], Awaitable[None]]


async def busy_flush(grounds: Grounds) -> None:
    """Refused by ranks that are at work."""
    await grounds.client.post("flush", "/flush_cache", {}, allowed=(200, 400))


async def quiet_flush(grounds: Grounds) -> None:
    """New requests wait until all is flushed."""
    grounds.open.clear()
    try:
        await grounds.client.post("flush", f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", {})
    finally:
        grounds.open.set()


async def same_weights(grounds: Grounds) -> None:
    """SGLang lets what runs come to its end first; but requests whose clients have gone still run, and a rank that has
    one refuses the flush: 400, and the operator has to."""
    body = {"model_path": str(grounds.model), "flush_cache": True}
    if await grounds.client.post("weights", "/update_weights_from_disk", body, allowed=(200, 400)) is None:
        await quiet_flush(grounds)


async def abort_all(grounds: Grounds) -> None:
    await grounds.client.post("abort all", "/abort_request", {"abort_all": True})


async def pause(grounds: Grounds) -> None:
    """Answers wait where they are, or are computed anew."""
    mode = grounds.client.rng.choice(["in_place", "retract"])
    await grounds.client.post("pause", "/pause_generation", {"mode": mode})
    await asyncio.sleep(grounds.client.rng.random() * 2)
    await grounds.client.post("pause", "/continue_generation", {})


async def stop_a_rank(grounds: Grounds) -> None:
    """One rank stands still for some seconds, as under a debugger or a full machine."""
    pid = grounds.client.rng.choice(grounds.schedulers)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(1 + grounds.client.rng.random() * 4)
    finally:
        send(pid, signal.SIGCONT)


async def crowd(grounds: Grounds) -> None:
    """Many at once ask the same, and many others something new."""
    kinds = [traffic.plain] * CROWD + [traffic.fresh] * CROWD
    await asyncio.gather(*(kind(grounds.client) for kind in kinds))


DISTURBANCES: dict[Disturbance, int] = {
    busy_flush: 4,
    quiet_flush: 2,
    same_weights: 2,
    abort_all: 2,
    pause: 2,
    stop_a_rank: 3,
    crowd: 4,
}
"""How often each is drawn, of the sum."""
