# SPDX-License-Identifier: Apache-2.0
"""The tokens of a prompt: the client's, or those that a server's ``/tokenize`` gives for text and chats. Of requests
that it makes a chat of first only a server that runs Banyan tells them.

A server renders a chat with its own template, its tools and its settings, which a tokenizer loaded here could only
try to repeat. It costs a round trip and a tokenisation; nothing else waits for it, and failing is no error.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import aiohttp
import msgspec

from banyan.decoding import json_of
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import pack
from banyan.router.call import as_it_came
from banyan.router.fleet import Fleet, Server
from banyan.router.metrics import Metrics
from banyan.router.prompt import Request
from banyan.router.settings import Settings
from banyan.routing.headers import TENANT_HEADER
from banyan.routing.question import PATH_FIELD
from banyan.routing.tenant_secret import TenantSecret
from banyan.whole_answer import whole

MOST_ASKING = 64
"""Questions at a time. Beyond, prompts are compared as text."""

MOST_ASKED_BYTES = 2 << 20
"""Of a question: for more a server takes longer than it is waited for, and none of its streams goes on meanwhile."""

MOST_BYTES = 64 << 20
"""Of an answer: nothing else runs while it is read. A million tokens have some seven."""


Write = Callable[[Mapping[str, Any] | None], Awaitable[bytes]]


class Tokens:
    """Asks servers that are up, in turn."""

    def __init__(self, fleet: Fleet, settings: Settings, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._fleet = fleet
        self._settings = settings
        self._session = session
        self._metrics = metrics
        # Of what a client may ask, the router has looked whether it may.
        secret = settings.tenant_secret
        self._says = {} if secret is None else {TENANT_HEADER: TenantSecret(secret).routers_word}
        self._turns = count()
        self._num_asking = 0

    async def of(self, request: Request, headers: Mapping[str, str], write: Write, held_at: str | None = None) -> Asked:
        """The request, with its tokens where they are of use: events can only be compared with them. The question for
        them, which has the whole of what was read, is let go. ``write``: makes the question's bytes, where that holds
        nobody up. ``held_at``: the one server that knows what it goes on from."""
        token_ids = await self._of(request, headers, write, held_at)
        return Asked(replace(request, tokenize=None), token_ids, held_at)

    async def _of(
        self, request: Request, headers: Mapping[str, str], write: Write, held_at: str | None
    ) -> array[int] | None:
        if request.token_ids is not None or (request.text is None and request.tokenize is None):
            return request.token_ids
        if not self._settings.tokenize or not self._fleet.has_events:
            return None
        # Of those of an adapter, or with an extra key, events name no page that could be computed here.
        is_of_use = request.tokenize is not None and request.is_salted_only
        # No question is shorter than its text; that of Responses may have no text, and others have more beside it.
        is_of_use = is_of_use and len(request.text or b"") <= MOST_ASKED_BYTES
        token_ids = None
        # Questions are asked before there is a place for the request: so many requests, and no more, may cost servers
        # more than that they are refused.
        if is_of_use and self._num_asking < MOST_ASKING:
            self._num_asking += 1
            try:
                token_ids = await self._ask(request, headers, write, held_at)
            finally:
                self._num_asking -= 1
        if token_ids is None:
            self._metrics.untokenised.inc()
        return token_ids

    def _able(self, request: Request, held_at: str | None) -> list[Server]:
        """Those that can tell the tokens of this request."""
        up = [server for server in self._fleet.servers if server.takes_requests]
        if request.follows is not None:
            up = [server for server in up if server.url == held_at]
        if PATH_FIELD in (request.tokenize or {}):
            up = [server for server in up if server.description.places_itself]
        return up

    async def _ask(
        self, request: Request, headers: Mapping[str, str], write: Write, held_at: str | None
    ) -> array[int] | None:
        able = self._able(request, held_at)
        if not able:
            return None
        server = able[next(self._turns) % len(able)]
        onward = {"content-type": "application/json", **self._says}
        if "authorization" in headers:
            onward["authorization"] = as_it_came(headers["authorization"])
        try:
            data = await write(request.tokenize)
            if len(data) > MOST_ASKED_BYTES:
                return None
            async with asyncio.timeout(self._settings.tokenize_timeout_s):
                async with self._session.post(f"{server.url}/tokenize", data=data, headers=onward) as response:
                    answer = json_of(await whole(response, MOST_BYTES))
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, RecursionError):
            # Counted by the caller. The server's health is the probes' business.
            return None
        if not isinstance(answer, dict) or answer.get(PATH_FIELD) != (request.tokenize or {}).get(PATH_FIELD):
            # Banyan is off there, or an older one: it has answered another question.
            return None
        return pack(answer.get("tokens")) or None
