# SPDX-License-Identifier: Apache-2.0
"""A server's answer as one piece, within bounds."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

MAX_ANSWER_BYTES = 512 << 20
"""Of one that is no stream: log-probabilities of a long prompt have as much as a tenth."""


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
    async for piece in response.content.iter_any():
        coming(len(piece))
        body += piece
        if len(body) > most_bytes:
            raise TooLarge(f"an answer of more than {most_bytes >> 20} MiB")
    return bytes(body)
