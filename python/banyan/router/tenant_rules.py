# SPDX-License-Identifier: Apache-2.0
"""Who may ask for what, where the router serves tenants: before a body is read, and when it has been.

Invariants
  1. A request that comes from here has a tenant, whose salt its server adds to each of its prompts, or concerns no
     prompt.
  2. What tenants have in common is refused: SGLang's sessions, and commands about requests by their ids. A response is
     found by the tenant that made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request

from banyan.observe.webpage import is_ours
from banyan.router import prompt
from banyan.router.bodies import Refused
from banyan.router.call import KnownTenant, joined, owner_of
from banyan.router.held_responses import HeldResponses
from banyan.router.metrics import Metrics
from banyan.router.paths import OTHER, RESPONSES, Row
from banyan.router.settings import Settings
from banyan.router.tenants import Tenants

logger = logging.getLogger("banyan.router")

LOOK_PERIOD_S = 1.0

NOT_FOR_TENANTS: Mapping[str, str] = {
    "/open_session": "a session is found by its id, whoever asks",
    "/close_session": "a session is found by its id, whoever asks",
    "/abort_request": "requests are found by their ids, whoever asks: close the connection instead",
    OTHER.path: "whether it keeps tenants apart is not known",
}
"""Paths, and why."""


class TenantRules:
    """Those of one router. ``tenants`` is None where it serves everybody, and then nothing here refuses."""

    def __init__(self, settings: Settings, metrics: Metrics, responses: HeldResponses) -> None:
        self.tenants: Tenants | None = None
        self._metrics = metrics
        self._responses = responses
        if settings.tenant_secret is not None:
            self.tenants = Tenants(Path(settings.tenants_file), settings.tenant_secret, settings.api_key)

    @property
    def secret_name(self) -> str:
        """What servers are to say of their secret; "" where they are to have none."""
        return self.tenants.secret.name if self.tenants is not None else ""

    def enter(self, row: Row, request: Request) -> KnownTenant | None:
        """The tenant of a request; None where there are none, and for what only this machine may ask.

        Raises:
            Refused: with 401 or 403.
        """
        if self.tenants is None or row.is_ours:
            return None
        tenant = self.tenants.known_by(request.headers)
        if (why := NOT_FOR_TENANTS.get(row.path)) is not None:
            raise Refused(f"{request.url.path} is not served to tenants: {why}", "forbidden", 403)
        response = request.path_params.get("response_id")
        if response is not None:
            self._check_response(response, tenant)
        return tenant

    def headers(self, tenant: KnownTenant | None, headers: Headers) -> dict[str, str]:
        """What servers get of a client's headers."""
        said = joined(headers.items())
        return said if tenant is None or self.tenants is None else self.tenants.onward(said)

    def check(self, row: Row, read: prompt.Request, tenant: KnownTenant | None) -> None:
        """The body of a request, when it has been read.

        Raises:
            Refused: with 400, 403 or 404.
        """
        if tenant is None or row.path != RESPONSES:
            return
        if not read.is_read:
            said = "for tenants, a request of Responses is JSON, uncompressed, and not too large to be read"
            raise Refused(said, "unread", 400)
        if read.names_response:
            raise Refused("request_id: the server names the responses of tenants", "forbidden", 403)
        if read.follows is not None:
            self._check_response(read.follows, tenant)

    def may_see_metrics(self, request: Request) -> bool:
        """They name tenants, and what they ask for."""
        return self.tenants is None or is_ours(request) or self.tenants.is_operator(request.headers)

    def read_again(self) -> None:
        """Read the file of keys again, soon. May be called by a handler of signals."""
        if self.tenants is not None:
            self.tenants.read_again()

    async def watch(self) -> None:
        """Follow the file of keys, until cancelled."""
        while self.tenants is not None:
            await asyncio.sleep(LOOK_PERIOD_S)
            await self._look(self.tenants)

    async def _look(self, tenants: Tenants) -> None:
        before, was_stale = tenants.keys.names, tenants.why_stale
        if await asyncio.to_thread(tenants.refresh):
            logger.info("--tenants-file: %d keys of %d tenants", len(tenants.keys.by_digest), len(tenants.keys.names))
            self._metrics.forget_tenants(before - tenants.keys.names)
        elif tenants.why_stale not in (None, was_stale):
            logger.error("--tenants-file: what it said before still counts: %s", tenants.why_stale)
        self._metrics.tenants_stale.set(tenants.why_stale is not None)

    def _check_response(self, response: str, tenant: KnownTenant) -> None:
        if self._responses.holder(response, owner_of(tenant)) is None:
            raise Refused("your tenant has no response with this id", "not_found", 404)
