# SPDX-License-Identifier: Apache-2.0
"""The tokens of a prompt: the client's, or those that a server's ``/tokenize`` gives for text and chats.

A server renders a chat with its own template, its tools and its settings, which a tokenizer loaded here could only
try to repeat. It costs a round trip and a tokenisation; nothing else waits for it, and failing is no error.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from itertools import count

import aiohttp
import msgspec

from banyan.decoding import json_of
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import pack
from banyan.router.fleet import Fleet
from banyan.router.metrics import Metrics
from banyan.router.prompt import Request
from banyan.router.settings import Settings
from banyan.router.upstream import whole

MOST_ASKING = 64
"""Questions at a time. Beyond, prompts are compared as text."""


class Tokens:
    """Asks servers that are up, in turn."""

    def __init__(self, fleet: Fleet, settings: Settings, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._fleet = fleet
        self._settings = settings
        self._session = session
        self._metrics = metrics
        self._turns = count()
        self._num_asking = 0

    async def of(self, request: Request, headers: Mapping[str, str]) -> Asked:
        """The request, with its tokens where they are of use: events can only be compared with them."""
        if request.token_ids is not None or request.text is None:
            return Asked(request, request.token_ids)
        if not self._settings.tokenize or not self._fleet.has_events:
            return Asked(request)
        token_ids = await self._ask_within_bounds(request, headers) if request.tokenize is not None else None
        if token_ids is None:
            self._metrics.untokenised.inc()
        return Asked(request, token_ids)

    async def _ask_within_bounds(self, request: Request, headers: Mapping[str, str]) -> array[int] | None:
        """Questions are asked before there is a place for the request: so many requests, and no more, may cost servers
        more than that they are refused."""
        if self._num_asking >= MOST_ASKING:
            return None
        self._num_asking += 1
        try:
            return await self._ask(request, headers)
        finally:
            self._num_asking -= 1

    async def _ask(self, request: Request, headers: Mapping[str, str]) -> array[int] | None:
        up = [server for server in self._fleet.servers if server.takes_requests]
        if not up:
            return None
        server = up[next(self._turns) % len(up)]
        onward = {"content-type": "application/json"}
        if "authorization" in headers:
            onward["authorization"] = headers["authorization"]
        try:
            async with asyncio.timeout(self._settings.tokenize_timeout_s):
                async with self._session.post(
                    f"{server.url}/tokenize", data=msgspec.json.encode(request.tokenize), headers=onward
                ) as response:
                    answer = json_of(await whole(response))
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            # Counted by the caller. The server's health is the probes' business.
            return None
        return pack(answer.get("tokens")) if isinstance(answer, dict) else None
