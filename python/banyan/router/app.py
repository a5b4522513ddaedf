# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application: SGLang's endpoints, passed on, and the router's own.

``/health`` and ``/metrics`` are the router's; ``/router/...`` and the page at ``/banyan`` answer this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from banyan.features.pairs import Role
from banyan.observe import Reading
from banyan.observe.asking import look
from banyan.observe.webpage import Page, is_ours
from banyan.router import endpoints, models, prompt
from banyan.router.answers import error, failed, forbidden, send_in_pieces, state_of, unless_gone
from banyan.router.asked_prompt import Asked
from banyan.router.bodies import Answers, Bodies, Refused
from banyan.router.call import CONTROL, Call, KnownTenant, owner_of, target_of
from banyan.router.clock import now_s
from banyan.router.dropped_lines import DroppedLines
from banyan.router.everywhere import ask_all
from banyan.router.fleet import Fleet, Server
from banyan.router.forward import Forwarder
from banyan.router.health import Health
from banyan.router.held_responses import HeldResponses
from banyan.router.load_feed import subscribe_to_load
from banyan.router.metrics import Metrics
from banyan.router.pair import PairForwarder
from banyan.router.paths import BY_PATH, MODELS, RESPONSES, Row, To
from banyan.router.probes import Probes, is_none_to_blame
from banyan.router.read_path import can_read_for, said_of
from banyan.router.settings import Settings
from banyan.router.subscription import miss_events, subscribe
from banyan.router.suspects import Suspects
from banyan.router.tasks import Tasks
from banyan.router.tenant_rules import TenantRules
from banyan.router.tokens import Tokens
from banyan.router.turns import Turns
from banyan.routing import POLICIES, Dispatcher, HotRankGuard, LoadReport
from banyan.routing.sent import BYTES_PER_TOKEN

logger = logging.getLogger("banyan.router")

T = TypeVar("T")

LARGE_BYTES, MANY_BRACKETS, MANY_COMMAS = 256 << 10, 8192, 16384
"""Reading a body of this size, or with so many of them, takes a millisecond."""

LONG_TOKENS = LARGE_BYTES // BYTES_PER_TOKEN
"""So does hashing so many."""

IDLE_S = 4.0
"""Connections to servers are kept so long. SGLang closes its own after 5 s: what is sent just then would be lost."""


class Router:
    """Everything that one router is made of. ``run`` is open while it serves."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.responses = HeldResponses()
        self.tenant_rules = TenantRules(settings, self.metrics, self.responses)
        self.fleet = self._fleet(settings.servers, Role.ALONE)
        self.decodes: Fleet | None = None
        if settings.prefills:
            self.fleet = self._fleet(settings.prefills, Role.PREFILL)
            self.decodes = self._fleet(settings.decodes, Role.DECODE)
        self.is_stopping = False
        self._bodies = Bodies(
            max_body_bytes=settings.max_body_mib << 20,
            max_bytes=settings.max_buffered_mib << 20,
            timeout_s=settings.body_timeout_s,
        )
        self._turns = Turns()
        self._dropped = re.compile(settings.drop_line) if settings.drop_line else None
        self._session: aiohttp.ClientSession
        self._context: zmq.asyncio.Context
        self.forwarder: Forwarder
        self.beside: Forwarder
        self.tokens: Tokens
        self._tasks = Tasks(lambda name: self.metrics.tasks_ended.labels(name).inc())
        self._subscriptions: dict[str, list[asyncio.Task[None]]] = {}

    def _fleet(self, urls: Sequence[str], role: Role) -> Fleet:
        settings = self.settings
        dispatcher = Dispatcher(0, POLICIES[settings.policy](), guard=HotRankGuard(settings.hot_rank_factor))
        servers = [Server(url, Health(settings.failures_to_down), role) for url in urls]
        return Fleet(servers, dispatcher, max_in_flight=settings.max_in_flight)

    @property
    def fleets(self) -> list[Fleet]:
        """Requests go to a server of each."""
        return [self.fleet] if self.decodes is None else [self.fleet, self.decodes]

    @property
    def all_servers(self) -> list[Server]:
        return [server for fleet in self.fleets for server in fleet.servers]

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        """Starlette's lifespan: connections, probes and subscriptions."""
        settings = self.settings
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=timeout,
            # A server's cookies are its client's.
            cookie_jar=aiohttp.DummyCookieJar(),
            # A server that compresses though it was not asked to is passed on as it is.
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept-encoding", "content-type"),
        ) as session:
            self._session = session
            self._context = zmq.asyncio.Context()
            # There are two for each rank, and one more while it is asked for what it has told before.
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
            suspects = Suspects(partial(is_none_to_blame, session, settings))
            self.forwarder = (
                self._forwarder(self.fleet, suspects)
                if self.decodes is None
                else PairForwarder(self.fleet, self.decodes, settings, session, self.metrics, suspects, self.responses)
            )
            # What a pair is not needed for goes to one of its servers.
            self.beside = self.forwarder if self.decodes is None else self._forwarder(self.decodes, suspects)
            # One queue: what gives one of them a place may be what the other waits for.
            self.beside.admission = self.forwarder.admission
            self.tokens = Tokens(self.fleet, settings, session, self.metrics)
            wake = self.forwarder.admission.wake
            for fleet in self.fleets:
                restarted = partial(self._subscribe, fleet)
                tenants = self.tenant_rules.secret_name
                probes = Probes(fleet, settings, session, changed=wake, restarted=restarted, tenants=tenants)
                for server in fleet.servers:
                    self._tasks.start("a server's probe", partial(probes.watch, server))
                    self._tasks.start("a server's health check", partial(probes.check_engine, server))
            self._tasks.start("the file of tenants", self.tenant_rules.watch)
            try:
                yield
            finally:
                await self._tasks.cancel()
                self._context.destroy(linger=0)

    def _forwarder(self, fleet: Fleet, suspects: Suspects[Server]) -> Forwarder:
        return Forwarder(fleet, self.settings, self._session, self.metrics, suspects, self.responses)

    def _subscribe(self, fleet: Fleet, server: Server) -> None:
        """Listen to a server that has (re)started."""
        for task in self._subscriptions.pop(server.url, ()):
            task.cancel()
        batches = self.metrics.event_batches.labels(server.url)
        self._tell_of_paths(server)
        events = [
            # What it knew may be wrong by the time that it listens again.
            self._tasks.start(
                "a feed of KV events", partial(subscribe, self._context, source, feed, batches.inc), feed.forget
            )
            for source, feed in zip(server.description.sources, server.feeds, strict=True)
        ]
        loads = [
            self._tasks.start("a feed of loads", partial(subscribe_to_load, self._context, source, told, now_s))
            for source in server.description.load_sources
            for told in (partial(self._told_load, fleet, server, source.rank),)
        ]
        watch = partial(miss_events, server.url, partial(fleet.tells_nothing, server))
        self._subscriptions[server.url] = [*events, *loads, self._tasks.start("a look for KV events", watch)]

    def _tell_of_paths(self, server: Server) -> None:
        """Who reads for whom, now that a server has said what it is."""
        if self.decodes is None or not self.settings.dual_path:
            return
        for prefill, decode in product(self.fleet.servers, self.decodes.servers):
            if server in (prefill, decode) and (line := said_of(prefill, decode)) is not None:
                logger.log(logging.INFO if can_read_for(decode, prefill) else logging.WARNING, line)

    def _told_load(self, fleet: Fleet, server: Server, rank: int, report: LoadReport) -> None:
        self.metrics.published_loads.labels(server.url).inc()
        fleet.told(server, rank, report)

    # ---- passed on ---------------------------------------------------------------------------------------------

    async def pass_on(self, row: Row, request: Request) -> ASGIApp:
        """Any path that servers answer."""
        if self.is_stopping:
            return error("the router is stopping", "stopping", 503, {"retry-after": "1"}, row.form)
        if row.is_ours and not is_ours(request):
            return forbidden()
        answers = Answers(self._bodies)
        try:
            response = await self._answered(row, request, answers)
        except BaseException:
            answers.end()
            raise
        self.metrics.requests.labels(row.path, str(response.status_code) if response is not None else "gone").inc()
        # Nobody reads it.
        response = response if response is not None else Response(status_code=499)
        return partial(send_in_pieces, answers, response)

    async def _answered(self, row: Row, request: Request, answers: Answers) -> Response | None:
        """A request's answer; None when its client has gone."""
        try:
            tenant = self._enter(row, request)
            client = owner_of(tenant) or (request.client.host if request.client is not None else "")
            async with self._bodies.read(request.stream(), client) as body:
                body = await self._without_lines(row, body, client)
                headers = self.tenant_rules.headers(tenant, request.headers)
                call = Call(row, request.method, target_of(request.scope), body, headers, answers, tenant, client)
                return await unless_gone(request, self._answer(call))
        except Refused as why:
            return self._refused(why, row)
        except ClientDisconnect:
            return None

    def _enter(self, row: Row, request: Request) -> KnownTenant | None:
        """The tenant of a request that can be passed on.

        Raises:
            Refused: with 400, 401 or 403.
        """
        if any(map(CONTROL.search, request.headers.values())):
            raise Refused("a header has a control character", "bad_header", 400)
        return self.tenant_rules.enter(row, request)

    def _refused(self, why: Refused, row: Row) -> Response:
        self.metrics.refused.labels(str(why.status)).inc()
        headers = {"connection": "close"} | ({"retry-after": "1"} if why.status == 503 else {})
        return error(why.message, why.kind, why.status, headers, row.form)

    async def _answer(self, call: Call) -> Response:
        row = call.row
        if row.to is not To.ONE:
            try:
                return await ask_all(self._session, self.all_servers, call, self.settings)
            finally:
                # Some may have done it, whoever has not.
                for fleet in self.fleets if row.empties else ():
                    fleet.forget_sent()
        if self.decodes is not None and not row.is_routable:
            if row.generates:
                return error(f"no pair of servers answers {row.path}", "not_found", 404, form=row.form)
            return await self.beside.forward(call, await self._read(call))
        asked = await self._read(call)
        if not asked.is_known:
            self.metrics.placed_by_load.labels(row.path).inc()
        return await self.forwarder.forward(call, asked)

    async def _without_lines(self, row: Row, body: bytes, client: str) -> bytes:
        """The body as it is to be passed on."""
        if self._dropped is None:
            return body
        lines = DroppedLines(self._dropped)
        if not _is_large(body):
            body = lines.without(row, body)
        elif self._turns.has_room(client):
            body = await self._turns.take(client, len(body), lines.without, row, body)
        self.metrics.dropped_lines.inc(lines.num_lines)
        return body

    async def _read(self, call: Call) -> Asked:
        """The request, with its tokens. A large one is read beside the loop, which others wait for; where too many do,
        as one that is too large to be read.

        Raises:
            Refused: for what a tenant may not ask, and for what goes on from a response, if it cannot be read now.
        """
        body, headers, salt = call.body, call.headers, call.tenant.salt if call.tenant is not None else None
        is_large, models = _is_large(body), self._models_served()
        if is_large and not self._turns.has_room(call.client):
            if call.row.path == RESPONSES:
                raise Refused("too many large requests wait to be read", "queue_full", 503)
            is_large, body = False, b""
        said = (call.row.path, body, headers, salt, models)

        async def done(work: Callable[..., T], *args: Any) -> T:
            return await self._turns.take(call.client, len(body), work, *args) if is_large else work(*args)

        read = await done(prompt.read, *said)
        self.tenant_rules.check(call.row, read, call.tenant)
        held_at = self.responses.holder(read.follows, owner_of(call.tenant)) if read.follows is not None else None
        # A request that would only be refused costs no server a question.
        if self.forwarder.admission.is_full:
            asked = Asked(replace(read, tokenize=None), read.token_ids, held_at)
        else:
            asked = await self.tokens.of(read, headers, partial(done, msgspec.json.encode), held_at)
        if is_large or asked.num_tokens >= LONG_TOKENS:
            sizes = {size for fleet in self.fleets for size in fleet.block_sizes}
            await self._turns.take(call.client, len(body), asked.hash_now, sizes)
        return asked

    def _models_served(self) -> frozenset[str]:
        """The names under which servers serve their models."""
        return frozenset(server.description.model for server in self.all_servers)

    async def models(self, request: Request) -> Response:
        """The models of all servers that are up, each once."""
        try:
            tenant = self._enter(BY_PATH[MODELS], request)
        except Refused as why:
            return self._refused(why, BY_PATH[MODELS])
        urls = [server.url for server in self.fleet.servers if server.takes_requests]
        return await models.models(self._session, urls, self.tenant_rules.headers(tenant, request.headers))

    # ---- its own -----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and somebody can be sent to."""
        well = not self.is_stopping and all(
            any(server.takes_requests for server in fleet.servers) for fleet in self.fleets
        )
        return Response(status_code=200 if well else 503)

    async def render_metrics(self, request: Request) -> Response:
        if not self.tenant_rules.may_see_metrics(request):
            return forbidden()
        text = self.metrics.render(self.all_servers, self.forwarder.admission.num_waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def servers(self, request: Request) -> Response:
        """How each server is, as the router sees it."""
        if not is_ours(request):
            return forbidden()
        return JSONResponse([state_of(server) for server in self.all_servers])

    def page(self) -> Page:
        """The page that shows the servers."""
        return Page(self.settings.urls, self._look_at, lambda: {"router": [state_of(one) for one in self.all_servers]})

    async def _look_at(self, url: str) -> Reading:
        return await look(self._session, url, self.settings.api_key)

    async def drain(self, request: Request) -> Response:
        """Send a server (``?server=URL``) nothing more; what it is doing goes on to its end."""
        return self._set_draining(request, True)

    async def resume(self, request: Request) -> Response:
        """Undo ``drain``."""
        return self._set_draining(request, False)

    def _set_draining(self, request: Request, is_draining: bool) -> Response:
        if not is_ours(request):
            return forbidden()
        url = request.query_params.get("server", "").rstrip("/")
        for server in self.all_servers:
            if server.url == url:
                server.is_draining = is_draining
                self.forwarder.admission.wake()
                return JSONResponse(state_of(server))
        return error(f"no server {url!r}: one of {', '.join(self.settings.urls)}", "not_found", 404)


def _is_large(body: bytes) -> bool:
    # First what needs no look at the body: all of a large one takes milliseconds.
    return (
        len(body) >= LARGE_BYTES or prompt.num_brackets(body) > MANY_BRACKETS or prompt.num_commas(body) > MANY_COMMAS
    )


def build(settings: Settings) -> tuple[Starlette, Router]:
    """The application and what it is made of."""
    router = Router(settings)
    routes = [
        *endpoints.known(router.pass_on, router.health, router.models),
        Route("/metrics", router.render_metrics),
        *router.page().routes(),
        Route("/router/servers", router.servers),
        Route("/router/drain", router.drain, methods=["POST"]),
        Route("/router/resume", router.resume, methods=["POST"]),
        *endpoints.others(router.pass_on, own="/router"),
    ]
    middleware, handlers = [Middleware(endpoints.of_paths)], {Exception: failed}
    return Starlette(routes=routes, lifespan=router.run, middleware=middleware, exception_handlers=handlers), router
