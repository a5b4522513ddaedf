# SPDX-License-Identifier: Apache-2.0
"""Asks servers how they are: what they are, whether their engines answer, and how busy they are."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from banyan.decoding import json_of
from banyan.observe.asking import MAX_TOLD_BYTES
from banyan.router.clock import now_s
from banyan.router.description import UNKNOWN, Description, read_loads
from banyan.router.fleet import Fleet, Server
from banyan.router.health import Probe, State
from banyan.router.settings import Settings
from banyan.routing.reads import ReadQueue
from banyan.whole_answer import whole

logger = logging.getLogger("banyan.router")


PROMPT_S = 1.0
"""SGLang says 503 at once while it ends or begins; of an engine that hangs it says so after many looks, each a second
long."""


MOST_BYTES = 8 << 20
"""Of an answer about health or loads: nothing else runs while one is read."""


class BadAnswer(Exception):
    """The server answered, and not well."""


class Ending(Exception):
    """The server says that it takes nothing new."""


class WrongRole(Exception):
    """The server is not what the router was told."""


def nobody_listens(error: BaseException | None) -> bool:
    """Whether a connection was refused, rather than not made for another reason."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED


class Probes:
    """Keeps the fleet's knowledge of one server fresh, until cancelled.

    Args:
        changed: called when requests that wait may have a place now.
        restarted: called with a server whose description is new.
        tenants: what servers are to say of the secret by which they believe the router; "" for none.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        session: aiohttp.ClientSession,
        *,
        changed: Callable[[], None],
        restarted: Callable[[Server], None],
        tenants: str = "",
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._session = session
        self._changed = changed
        self._restarted = restarted
        self._tenants = tenants

    async def watch(self, server: Server) -> None:
        """Look at a server's load again and again; bring it up when it can be."""
        while True:
            if server.health.state is State.UP:
                await self._checked(server, Probe.LOAD, self._look_at_load(server))
            else:
                await self._checked(server, Probe.ENGINE, self._bring_up(server))
            await asyncio.sleep(self._settings.probe_interval_s)

    async def check_engine(self, server: Server) -> None:
        """Have the engine of a server that is up make a token, now and then."""
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            if server.health.state is State.UP:
                await self._checked(server, Probe.ENGINE, self._look_at_engine(server))

    async def _checked(self, server: Server, probe: Probe, look: Awaitable[None]) -> None:
        try:
            await look
        except (aiohttp.ClientError, TimeoutError, BadAnswer, Ending, WrongRole, ValueError) as error:
            was = server.health.state
            said = f"{probe.value}: {type(error).__name__}: {error}"
            if isinstance(error, WrongRole):
                # What it has said of itself, the secret too, was said by another one.
                server.description = UNKNOWN
                if said != server.health.last_error:
                    logger.error("%s takes no requests: %s", server.url, error)
            if nobody_listens(error):
                server.health.refused(said)
            elif isinstance(error, Ending):
                server.health.ends(said)
            elif server.health.failed(probe, said):
                self._fleet.gave_up(server, f"it does not answer ({said})", self._settings.probe_timeout_s)
            if was is State.UP and server.health.state is State.DOWN:
                logger.warning("%s is down: %s", server.url, said)
        else:
            server.health.passed(probe)

    async def _bring_up(self, server: Server) -> None:
        await self._look_at_engine(server)
        info = await self._get(server, "/server_info", self._settings.probe_timeout_s, MAX_TOLD_BYTES)
        description = Description.read(info, server.url)
        if description.role is not server.role:
            raise WrongRole(f"its --disaggregation-mode is {description.role.value}, not {server.role.value}")
        if description.tenants != self._tenants:
            raise WrongRole(_why_not_with_tenants(description.tenants, self._tenants))
        before = server.description
        if before is not UNKNOWN and before.started != description.started:
            # Where a node has lost its power no connection says so.
            self._fleet.gave_up(server, "it was started anew")
        if self._fleet.described(server, description):
            self._restarted(server)
        await self._look_at_load(server)
        server.health.came_up()
        logger.info("%s is up: %d targets, KV events of %d ranks", server.url, len(server.targets), len(server.feeds))
        self._changed()

    async def _look_at_engine(self, server: Server) -> None:
        asked_s = time.monotonic()
        try:
            await self._get(server, "/health", self._settings.health_timeout_s)
        except aiohttp.ClientResponseError as error:
            if error.status == 503 and time.monotonic() - asked_s < PROMPT_S:
                raise Ending("/health says 503 at once: it ends, or begins") from error
            raise

    async def _look_at_load(self, server: Server) -> None:
        asked_s = now_s()
        try:
            answer = await self._get(server, "/v1/loads?include=core", self._settings.probe_timeout_s)
            reports, reads = read_loads(answer, asked_s)
        except aiohttp.ClientResponseError as error:
            if error.status != 404:
                raise
            reports, reads = {}, ReadQueue()
        self._fleet.reported(server, reports, reads)

    async def _get(self, server: Server, path: str, timeout_s: float, most_bytes: int = MOST_BYTES) -> Any:
        return await ask(self._session, self._settings, server, path, timeout_s, most_bytes)


def _why_not_with_tenants(said: str, expected: str) -> str:
    if not expected:
        return "it serves tenants (--banyan-tenant-secret-file): give the router --tenants-file"
    if not said:
        return "it keeps no tenants apart: give it --banyan-tenant-secret-file with the router's secret"
    return "its --banyan-tenant-secret-file holds another secret than the router's --tenant-secret-file"


async def ask(
    session: aiohttp.ClientSession,
    settings: Settings,
    server: Server,
    path: str,
    timeout_s: float,
    most_bytes: int = MOST_BYTES,
) -> Any:
    """The JSON of an answer, None for an empty one."""
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key is not None else {}
    async with asyncio.timeout(timeout_s):
        async with session.get(server.url + path, headers=headers, raise_for_status=True) as response:
            body = await whole(response, most_bytes)
    try:
        return json_of(body) if body else None
    except msgspec.DecodeError as error:
        raise BadAnswer(f"{path}: {error}") from None


async def is_none_to_blame(session: aiohttp.ClientSession, settings: Settings, server: Server) -> bool:
    """Whether no request is to be suspected of what befell a server: it was told to end, or its engine is well."""
    if server.is_draining or server.health.is_ending:
        return True
    if server.health.state is State.DOWN:
        return False
    try:
        await ask(session, settings, server, "/health", settings.health_timeout_s)
    except (aiohttp.ClientError, TimeoutError, BadAnswer) as error:
        if nobody_listens(error):
            server.health.refused(f"{type(error).__name__}: {error}")
        return False
    return True
