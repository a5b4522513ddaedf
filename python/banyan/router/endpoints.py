# SPDX-License-Identifier: Apache-2.0
"""The rows of ``paths`` as routes of an ASGI application."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan.router.answers import error
from banyan.router.paths import MODELS, OTHER, ROWS, Row, To

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
PassOn = Callable[[Row, Request], Awaitable[ASGIApp]]

_PATH = re.compile(rb"/(?!/)")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def known(pass_on: PassOn, health: Endpoint, models: Endpoint) -> list[Route]:
    """Those of the table."""

    def endpoint(row: Row) -> Endpoint:
        if row.to is To.ROUTER:
            return models if row.path == MODELS else health
        return _ask_a_server if row.to is To.NOBODY else _passed_on(row, pass_on)

    return [Route(row.path, endpoint(row), methods=list(row.methods or METHODS)) for row in ROWS]


def others(pass_on: PassOn, own: str) -> Iterator[Route]:
    """Any other path, and any other method, but for what is below ``own``."""
    yield Route(f"{own}/{{path:path}}", _unknown, methods=list(METHODS))
    yield Route("/{path:path}", _passed_on(OTHER, pass_on), methods=list(METHODS))


def of_paths(app: ASGIApp) -> ASGIApp:
    """``app``, for requests whose line names a path. It may name something else (``a@b/x``, ``*``, a whole URL): that
    may look like one of the paths above when it is unquoted (``%2F@b/x``), and behind a server's address it would name
    another server."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        is_path = scope["type"] != "http" or _PATH.match(scope["raw_path"])
        await (app if is_path else error("a path begins with one /", "bad_path", 400))(scope, receive, send)

    return checked


def _passed_on(row: Row, pass_on: PassOn) -> Endpoint:
    async def passed_on(request: Request) -> ASGIApp:
        return await pass_on(row, request)

    return passed_on


async def _ask_a_server(request: Request) -> Response:
    message = f"{request.url.path} is about one server: ask that one itself; the router does not pass it on"
    return error(message, "not_found", 404)


async def _unknown(request: Request) -> Response:
    return error(f"the router has no {request.method} {request.url.path}", "not_found", 404)
