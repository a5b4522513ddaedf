# SPDX-License-Identifier: Apache-2.0
"""A server's answer as one piece, within bounds; or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

MAX_ANSWER_BYTES = 512 << 20
"""Of one that is no stream: log-probabilities of a long prompt have as much as a tenth."""


CUT_OFF = "the connection ended in the middle of an answer"


class TooLarge(aiohttp.ClientError):
    """An answer that is not read to its end."""


async def whole(
    response: aiohttp.ClientResponse,
    most_bytes: int = MAX_ANSWER_BYTES,
    coming: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """The body of an answer; a server is not to fill the memory of who asks. ``coming`` is told the size of each piece,
    and may raise.

    Raises:
        aiohttp.ClientError: when it breaks off, or has more than ``most_bytes``.
    """
    body = bytearray()
    while piece := await next_piece(response):
        coming(len(piece))
        body += piece
        if len(body) > most_bytes:
            raise TooLarge(f"an answer of more than {most_bytes >> 20} MiB")
    return bytes(body)


async def next_piece(response: aiohttp.ClientResponse) -> bytes:
    """What comes next of an answer, ``b""`` at its end.

    Raises:
        aiohttp.ClientError: when it breaks off.
    """
    content, protocol = response.content, response.connection and response.connection.protocol

    def tell(ended: asyncio.Future[None]) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError(CUT_OFF))

    # At a chunk that is none, aiohttp 3.14 closes the connection and tells nobody who waits for more of the answer.
    ended = None if protocol is None else protocol.closed
    if ended is not None:
        ended.remove_done_callback(_look)
        ended.add_done_callback(_look)
        ended.add_done_callback(tell)
    try:
        return await content.readany()
    except RuntimeError as error:
        # Who asks on a connection that is closed gets this one.
        raise aiohttp.ClientPayloadError(CUT_OFF) from error
    finally:
        if ended is not None:
            ended.remove_done_callback(tell)


def _look(ended: asyncio.Future[None]) -> None:
    """asyncio logs an exception at which nobody has looked: that of a connection which is broken when it idles."""
    if not ended.cancelled():
        ended.exception()
