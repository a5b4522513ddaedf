# SPDX-License-Identifier: Apache-2.0
"""The router as an ASGI application: SGLang's endpoints, passed on, and the router's own.

``/health`` and ``/metrics`` are the router's; ``/router/...`` and the page at ``/banyan`` answer this machine only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import aiohttp
import zmq.asyncio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from banyan.disagg import Role
from banyan.observe import Reading
from banyan.observe.asking import look
from banyan.observe.webpage import Page, is_ours
from banyan.router import models, prompt
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import ARENA, STORE
from banyan.router.bodies import Bodies, Refused
from banyan.router.fleet import Fleet, Server
from banyan.router.forward import Forwarder
from banyan.router.health import Health
from banyan.router.load_feed import subscribe_to_load
from banyan.router.metrics import Metrics
from banyan.router.pair import PairForwarder
from banyan.router.probes import Probes, is_none_to_blame
from banyan.router.read_path import can_read_for, said_of
from banyan.router.settings import Settings
from banyan.router.subscription import subscribe
from banyan.router.suspects import Suspects
from banyan.router.tokens import Tokens
from banyan.router.verdict import error_body
from banyan.routing import POLICIES, Dispatcher, HotRankGuard, LoadReport

logger = logging.getLogger("banyan.router")

LARGE_BYTES = 256 << 10
"""Reading a body of this size takes a millisecond."""


class Router:
    """Everything that one router is made of. ``run`` is open while it serves."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.fleet = self._fleet(settings.servers, Role.ALONE)
        self.decodes: Fleet | None = None
        if settings.prefills:
            self.fleet = self._fleet(settings.prefills, Role.PREFILL)
            self.decodes = self._fleet(settings.decodes, Role.DECODE)
        self.is_stopping = False
        self._bodies = Bodies(
            max_body_bytes=settings.max_body_bytes,
            max_bytes=settings.max_buffered_mib << 20,
            timeout_s=settings.body_timeout_s,
        )
        # One, so that no more than one large prompt is read beside the loop.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="banyan-read-prompt")
        self._session: aiohttp.ClientSession
        self._context: zmq.asyncio.Context
        self.forwarder: Forwarder
        self.tokens: Tokens
        self._tasks: set[asyncio.Task[None]] = set()
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
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            # A server that compresses though it was not asked to is passed on as it is.
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept-encoding", "content-type"),
        ) as session:
            self._session = session
            self._context = zmq.asyncio.Context()
            suspects = Suspects(partial(is_none_to_blame, session, settings))
            self.forwarder = (
                Forwarder(self.fleet, settings, session, self.metrics, suspects)
                if self.decodes is None
                else PairForwarder(self.fleet, self.decodes, settings, session, self.metrics, suspects)
            )
            self.tokens = Tokens(self.fleet, settings, session, self.metrics)
            wake = self.forwarder.admission.wake
            for fleet in self.fleets:
                restarted = partial(self._subscribe, fleet)
                probes = Probes(fleet, settings, session, changed=wake, restarted=restarted)
                for server in fleet.servers:
                    self._start(probes.watch(server))
                    self._start(probes.check_engine(server))
            try:
                yield
            finally:
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._context.destroy(linger=0)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _subscribe(self, fleet: Fleet, server: Server) -> None:
        """Listen to a server that has (re)started."""
        for task in self._subscriptions.pop(server.url, ()):
            task.cancel()
        batches = self.metrics.event_batches.labels(server.url)
        assert server.description is not None
        self._tell_of_paths(server)
        events = [
            subscribe(self._context, source, feed, batches.inc)
            for source, feed in zip(server.description.sources, server.feeds, strict=True)
        ]
        loads = [
            subscribe_to_load(self._context, source, partial(self._told_load, fleet, server, source.rank), time.time)
            for source in server.description.load_sources
        ]
        self._subscriptions[server.url] = [self._start(work) for work in (*events, *loads)]

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

    async def generate(self, request: Request) -> Response:
        """Any of ``prompt.PATHS``."""
        if self.is_stopping:
            return _error("the router is stopping", "stopping", 503, {"retry-after": "1"})
        path = request.url.path
        try:
            async with self._bodies.read(request.stream()) as body:
                response = await _unless_gone(request, self._answer(path, body, request))
        except Refused as refused:
            self.metrics.refused.labels(str(refused.status)).inc()
            headers = {"connection": "close"} | ({"retry-after": "1"} if refused.status == 503 else {})
            response = _error(refused.message, refused.kind, refused.status, headers)
        except ClientDisconnect:
            response = None
        self.metrics.requests.labels(path, str(response.status_code) if response is not None else "gone").inc()
        # Nobody reads it.
        return response if response is not None else Response(status_code=499)

    async def _answer(self, path: str, body: bytes, request: Request) -> Response:
        asked = await self._read(path, body, request.headers)
        target = f"{path}?{request.url.query}" if request.url.query else path
        return await self.forwarder.forward(target, asked, body, dict(request.headers))

    async def _read(self, path: str, body: bytes, headers: Mapping[str, str]) -> Asked:
        """The request, with its tokens. A large one is read beside the loop, which others wait for."""
        if len(body) < LARGE_BYTES:
            read = prompt.read(path, body, headers)
        else:
            read = await asyncio.get_running_loop().run_in_executor(self._reader, prompt.read, path, body, headers)
        # A request that would only be refused costs no server a question.
        asked = Asked(read, read.token_ids) if self.forwarder.is_full else await self.tokens.of(read, headers)
        if len(body) >= LARGE_BYTES:
            await asyncio.get_running_loop().run_in_executor(self._reader, lambda: asked.pieces)
        return asked

    async def models(self, request: Request) -> Response:
        """The models of all servers that are up, each once."""
        urls = [server.url for server in self.fleet.servers if server.takes_requests]
        return await models.models(self._session, urls, request.headers)

    # ---- its own -----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and somebody can be sent to."""
        well = not self.is_stopping and all(
            any(server.takes_requests for server in fleet.servers) for fleet in self.fleets
        )
        return Response(status_code=200 if well else 503)

    async def render_metrics(self, request: Request) -> Response:
        text = self.metrics.render(self.all_servers, self.forwarder.admission.num_waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def servers(self, request: Request) -> Response:
        """How each server is, as the router sees it."""
        if not is_ours(request):
            return _forbidden()
        return JSONResponse([_state(server) for server in self.all_servers])

    def page(self) -> Page:
        """The page that shows the servers."""
        return Page(self.settings.urls, self._look_at, lambda: {"router": [_state(one) for one in self.all_servers]})

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
            return _forbidden()
        url = request.query_params.get("server", "").rstrip("/")
        for server in self.all_servers:
            if server.url == url:
                server.is_draining = is_draining
                self.forwarder.admission.wake()
                return JSONResponse(_state(server))
        return _error(f"no server {url!r}: one of {', '.join(self.settings.urls)}", "not_found", 404)


def build(settings: Settings) -> tuple[Starlette, Router]:
    """The application and what it is made of."""
    router = Router(settings)
    routes = [
        *(Route(path, router.generate, methods=["POST"]) for path in prompt.PATHS),
        Route(models.PATH, router.models),
        Route("/health", router.health),
        Route("/metrics", router.render_metrics),
        *router.page().routes(),
        Route("/router/servers", router.servers),
        Route("/router/drain", router.drain, methods=["POST"]),
        Route("/router/resume", router.resume, methods=["POST"]),
    ]
    return Starlette(
        routes=routes, lifespan=router.run, exception_handlers={HTTPException: _refused, Exception: _failed}
    ), router


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response | None:
    """The result of ``work``, or None when the client went away first: then it is cancelled."""
    answer = asyncio.ensure_future(work)
    # The body has been read, so that the next message can only be that the client has gone.
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


def _error(message: str, kind: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(message, kind, status), status, headers, "application/json")


def _forbidden() -> Response:
    return _error("/router answers this machine only, under its address or localhost", "forbidden", 403)


async def _refused(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself, in the form that clients of servers read."""
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _error(message, kind, error.status_code, dict(error.headers or {}))


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of the router. Starlette raises the error again, so that it is in the log."""
    return _error("the router has failed: its log says how", "internal_error", 500)


def _state(server: Server) -> dict[str, Any]:
    said = server.description
    return {
        "server": server.url,
        "role": server.role.value,
        "state": server.health.state.value,
        "is_draining": server.is_draining,
        "num_in_flight": len(server.in_flight),
        "num_given_tokens": server.num_given_tokens,
        "door": said.door if said is not None else "",
        "lends_at": str(said.lends_at) if said is not None and said.lends_at is not None else "",
        "borrows_from": [str(door) for door in said.borrows_from] if said is not None else [],
        "num_targets": len(server.targets),
        "known_blocks": [len(feed.blocks) for feed in server.feeds],
        "known_arena_blocks": [feed.blocks.num_in(ARENA) for feed in server.feeds],
        "known_stored_blocks": [feed.blocks.num_in(STORE) for feed in server.feeds],
        "store": said.store if said is not None else "",
        "last_error": server.health.last_error,
    }
