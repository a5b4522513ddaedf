# SPDX-License-Identifier: Apache-2.0
"""``banyan web URL ...``: the page of `banyan route` without a router, on 127.0.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from banyan.observe import Reading
from banyan.observe.asking import look
from banyan.observe.webpage import PATH, Page

HOST = "127.0.0.1"


def build(urls: Sequence[str], api_key: str | None = None) -> Starlette:
    """The application that shows these servers."""
    sessions: list[aiohttp.ClientSession] = []

    @contextlib.asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as session:
            sessions.append(session)
            yield

    async def look_at(url: str) -> Reading:
        return await look(sessions[0], url, api_key)

    async def to_page(request: Request) -> Response:
        return RedirectResponse(PATH)

    page = Page([url.rstrip("/") for url in urls], look_at)
    return Starlette(routes=[Route("/", to_page), *page.routes()], lifespan=run)


def serve(urls: Sequence[str], *, port: int, api_key: str | None) -> int:
    """Serve until interrupted; the exit status."""
    config = uvicorn.Config(build(urls, api_key), host=HOST, port=port, log_level="warning", proxy_headers=False)
    server = uvicorn.Server(config)
    print(f"http://{HOST}:{port}{PATH}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else 1
