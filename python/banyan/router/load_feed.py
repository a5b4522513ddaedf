# SPDX-License-Identifier: Apache-2.0
"""Listens to the load that one rank publishes: what ``/v1/loads`` would answer, as soon as it changes.

The wire is SGLang's: a PUB socket sends ``[topic, number, LoadStat]``. A message that is lost is made good by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from banyan.router.description import LoadSource
from banyan.routing import LoadReport

logger = logging.getLogger("banyan.router")


class LoadStat(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A rank's load in the order of the wire; SGLang adds fields at its end."""

    num_running: int
    num_waiting: int
    used_tokens: int
    pool_tokens: int
    rank: int | None = None
    pending_prefill_tokens: int = 0
    ongoing_tokens: int = 0
    max_running: int = 0
    total_prefill_tokens: int = 0
    total_prefill_us: int = 0


_decoder = msgspec.msgpack.Decoder(LoadStat)


def read_load(payload: bytes, taken_s: float) -> LoadReport:
    """Raises msgspec.DecodeError for anything that is no load."""
    stat = _decoder.decode(payload)
    return LoadReport(
        taken_s=taken_s,
        num_running=stat.num_running,
        num_waiting=stat.num_waiting,
        pending_prefill_tokens=stat.pending_prefill_tokens,
        ongoing_tokens=stat.ongoing_tokens,
        free_tokens=max(0, stat.pool_tokens - stat.used_tokens),
        total_prefill_tokens=stat.total_prefill_tokens,
        total_prefill_us=stat.total_prefill_us,
    )


async def follow_load(
    context: zmq.asyncio.Context, source: LoadSource, told: Callable[[LoadReport], None], clock: Callable[[], float]
) -> None:
    """Hand every report to ``told``, taken when it comes in, until cancelled."""
    with context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.subscribe(source.topic)
        socket.connect(source.endpoint)
        while True:
            try:
                _, _, payload = await socket.recv_multipart()
                report = read_load(payload, clock())
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("%s sends what is no load: %s", source.endpoint, error)
                continue
            told(report)
