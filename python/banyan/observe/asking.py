# SPDX-License-Identifier: Apache-2.0
"""Asks a server for what a reading is made of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from banyan.decoding import json_of, printable
from banyan.observe.reading import Reading
from banyan.whole_answer import whole

TIMEOUT_S = 15.0
HEALTH_TIMEOUT_S = 2.0
"""Of ranks that stand still this is told at once. Where none does, a busy server takes longer."""
MAX_HEALTH_BYTES = 4096
MAX_TOLD_BYTES = 64 << 20
"""A rank tells 300 KB at most: 32 prompts of 65 marks, 256 decisions."""


class Unanswered(Exception):
    """The server did not answer, or not so that it can be read; one line that says why."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


async def look(session: aiohttp.ClientSession, url: str, api_key: str | None) -> Reading:
    """A server now.

    Raises:
        Unanswered: when it cannot be asked, or runs without Banyan.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            info = await _json(session, f"{url}/server_info", api_key)
            loads = await _loads(session, f"{url}/v1/loads?include=core", api_key)
        return await asyncio.to_thread(Reading.of, url, time.time(), info, loads)
    except TimeoutError:
        silence = await _silence(session, url)
        raise Unanswered(f"{url} has not answered for {TIMEOUT_S:g} s{silence}") from None
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        raise Unanswered(f"{url} does not answer: {type(error).__name__}: {error}") from None
    except ValueError as error:
        raise Unanswered(str(error)) from None


async def _silence(session: aiohttp.ClientSession, url: str) -> str:
    """Of a server that does not answer: what is known where a rank stands still, for then no other one tells it."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(HEALTH_TIMEOUT_S), session.get(f"{url}/health_ranks") as response:
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return f": {(await whole(response, MAX_HEALTH_BYTES)).decode(errors='replace').strip()}"
    return ""


async def _loads(session: aiohttp.ClientSession, url: str, api_key: str | None) -> Any:
    try:
        return await _json(session, url, api_key)
    except aiohttp.ClientResponseError as error:
        if error.status != 404:
            raise
        return None


async def _json(session: aiohttp.ClientSession, url: str, api_key: str | None) -> Any:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    # The router's session leaves what is compressed as it is, and asks for nothing compressed.
    async with session.get(url, headers=headers, raise_for_status=True) as response:
        return json_of(await whole(response, MAX_TOLD_BYTES))
