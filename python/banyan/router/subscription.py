# SPDX-License-Identifier: Apache-2.0
"""Listens to the KV events of one rank, and asks for what it missed.

pyzmq does not give way to others while there are messages: whoever reads them does, after each.

The wire is SGLang's: a PUB socket sends ``[topic, number, batch]``, a ROUTER socket gives earlier ones again, from a
number on, and ends with number -1. ZeroMQ connects again by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from banyan.router.description import Source
from banyan.router.events import EventFeed, read_batch, read_number
from banyan.transport.lost_peers import notice_silence

logger = logging.getLogger("banyan.router")

MAX_MESSAGE_BYTES = 64 << 20
"""A batch with the tokens of a million pages would have as much."""

REPLAY_TIMEOUT_S = 2.0
"""Between two messages of a replay; the publisher looks for requests about ten times a second."""

MOST_REPLAYED = 1 << 17
"""Batches that wait to be applied: more than ten times what a publisher keeps by default."""

SILENT_S = 60.0
"""A rank tells of what it has computed within a second."""

REPLAY_TRIES = 5
HOLE_TRIES = 2
"""A publisher sends all at once, and what its socket has no room for it drops: that is asked for again."""


async def subscribe(context: zmq.asyncio.Context, source: Source, feed: EventFeed, applied: Callable[[], None]) -> None:
    """Keep ``feed`` in step until cancelled; ``applied`` is called after each batch."""
    with context.socket(zmq.SUB) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        notice_silence(socket)
        socket.subscribe(source.topic)
        socket.connect(source.endpoint)
        # A router that starts late asks for what was before it, again of a rank that stands still just then.
        for _ in range(REPLAY_TRIES):
            if await _replay(context, source, feed, 0):
                break
        while True:
            try:
                _, number, payload = await socket.recv_multipart()
                seq, batch = read_number(number), read_batch(payload)
                if seq < 0:
                    raise ValueError(f"a batch of number {seq}")
            except (ValueError, msgspec.DecodeError) as error:
                logger.warning("%s sends what is no KV event, its blocks are forgotten: %s", source.endpoint, error)
                feed.forget()
                await asyncio.sleep(0)
                continue
            missing = feed.first_missing(seq, batch)
            if missing is not None:
                await _replay(context, source, feed, missing)
            feed.apply(seq, batch)
            applied()
            await asyncio.sleep(0)


async def _replay(context: zmq.asyncio.Context, source: Source, feed: EventFeed, first: int) -> bool:
    """Apply earlier batches from ``first`` on, as far as the publisher still has them; whether it has answered. The
    feed notices what fails."""
    if source.replay is None:
        return True
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            # What is not taken at once is dropped there: as much as a publisher keeps, and no more than it may say.
            socket.set(zmq.RCVHWM, MOST_REPLAYED)
            socket.connect(source.replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            tries_left, has_hole = HOLE_TRIES, False
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    _, _, number, payload = await socket.recv_multipart()
                seq = read_number(number)
                if seq >= 0:
                    has_hole = has_hole or (tries_left > 0 and feed.has_hole_before(seq))
                    if not has_hole:
                        feed.apply(seq, read_batch(payload))
                    await asyncio.sleep(0)
                elif not has_hole:
                    return True
                else:
                    tries_left, has_hole = tries_left - 1, False
                    await socket.send_multipart((b"", (feed.next_seq or 0).to_bytes(8, "big")))
    except (TimeoutError, ValueError, msgspec.DecodeError, zmq.ZMQError) as error:
        logger.warning("%s did not replay from %d: %s: %s", source.replay, first, type(error).__name__, error)
        return not isinstance(error, (TimeoutError, zmq.ZMQError))


async def miss_events(url: str, tells_nothing: Callable[[], bool]) -> None:
    """Say so, once, where a server works and none of its events comes: ZeroMQ tries to connect for ever, silently."""
    num_looks = 0
    while num_looks < 2:
        await asyncio.sleep(SILENT_S)
        num_looks = num_looks + 1 if tells_nothing() else 0
    logger.warning(
        "%s works, and none of its KV events has come for %d s: what it holds is guessed from what it was sent. In its "
        '--kv-events-config, "bind" has to be true and "endpoint" an address that this machine reaches (not 127.0.0.1 '
        "from another one), with no firewall before the ports: one for each rank, from the one that is named",
        url,
        SILENT_S,
    )
