# SPDX-License-Identifier: Apache-2.0
"""Listens to the load that one rank publishes: what ``/v1/loads`` would answer, as soon as it changes.

The wire is SGLang's: a PUB socket sends ``[topic, number, LoadStat]``. A message that is lost is made good by the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated

import msgspec
import zmq
import zmq.asyncio

from banyan.decoding import decoded
from banyan.router.description import MOST, Source
from banyan.routing import LoadReport, report_of
from banyan.transport.lost_peers import notice_silence

logger = logging.getLogger("banyan.router")


MAX_MESSAGE_BYTES = 64 << 10

Number = Annotated[int, msgspec.Meta(le=MOST)]


class LoadStat(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A rank's load in the order of the wire, by the names of SGLang's snapshot; SGLang adds fields at its end."""

    num_running_reqs: Number
    num_waiting_reqs: Number
    num_used_tokens: Number
    max_total_num_tokens: Number
    dp_rank: int | None = None
    num_waiting_uncached_tokens: Number = 0
    num_total_tokens: Number = 0
    max_running_requests: Number = 0
    total_prefill_uncached_tokens: Number = 0
    total_prefill_busy_us: Number = 0


_decoder = msgspec.msgpack.Decoder(LoadStat)


def read_load(payload: bytes, taken_s: float) -> LoadReport:
    """Raises msgspec.DecodeError for anything that is no load."""
    return report_of(decoded(_decoder, payload), taken_s)


async def subscribe_to_load(
    context: zmq.asyncio.Context, source: Source, told: Callable[[LoadReport], None], clock: Callable[[], float]
) -> None:
    """Hand every report to ``told``, taken when it comes in, until cancelled."""
    with context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        notice_silence(socket)
        socket.subscribe(source.topic)
        socket.connect(source.endpoint)
        while True:
            try:
                _, _, payload = await socket.recv_multipart()
                report = read_load(payload, clock())
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("%s sends what is no load: %s", source.endpoint, error)
            else:
                told(report)
            # pyzmq does not give way to others while there are messages.
            await asyncio.sleep(0)
