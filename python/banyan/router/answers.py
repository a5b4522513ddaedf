# SPDX-License-Identifier: Apache-2.0
"""What the router answers by itself, to its clients and to who looks after it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from banyan.router.blocks import ARENA, STORE
from banyan.router.bodies import Answers
from banyan.router.fleet import Server
from banyan.router.forms import error_body
from banyan.router.paths import Form

PIECE_BYTES = 256 << 10
"""Of an answer: uvicorn sends one when the client has taken most of what went before it."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response | None:
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


async def send_in_pieces(answers: Answers, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer. What there is of it counts until its client has taken all but the last piece: a stream's as it
    comes, and all of a whole one, which may have to wait for what was sent before it."""

    async def in_pieces(message: Message) -> None:
        rest = whole = memoryview(message.get("body", b""))
        if isinstance(response, StreamingResponse):
            answers.are(len(whole))
        while len(rest) > PIECE_BYTES:
            await send({**message, "body": rest[:PIECE_BYTES], "more_body": True})
            rest = rest[PIECE_BYTES:]
        await send(message if rest is whole else {**message, "body": rest})

    # What other servers have said is not sent.
    answers.are(len(getattr(response, "body", b"")))
    try:
        await response(scope, receive, in_pieces)
    finally:
        answers.end()


def error(
    message: str, kind: str, status: int, headers: dict[str, str] | None = None, form: Form = Form.OPENAI
) -> Response:
    return Response(error_body(message, kind, status, form), status, headers, "application/json")


def forbidden() -> Response:
    return error("this path answers this machine only, under its address or localhost", "forbidden", 403)


async def failed(request: Request, why: Exception) -> Response:
    """A fault of the router. Starlette raises the error again, so that it is in the log."""
    return error("the router has failed: its log says how", "internal_error", 500)


def state_of(server: Server) -> dict[str, Any]:
    said = server.description
    return {
        "server": server.url,
        "role": server.role.value,
        "state": server.health.state.value,
        "is_draining": server.is_draining,
        "num_in_flight": len(server.in_flight),
        "num_given_tokens": server.num_given_tokens,
        "page_server": str(said.lends_at) if said.most_read_tokens else "",
        "lends_at": str(said.lends_at) if said.lends_at is not None else "",
        "borrows_from": [str(page_server) for page_server in said.borrows_from],
        "num_targets": len(server.targets),
        "known_blocks": [len(feed.blocks) for feed in server.feeds],
        "known_arena_blocks": [feed.blocks.num_in(ARENA) for feed in server.feeds],
        "known_stored_blocks": [feed.blocks.num_in(STORE) for feed in server.feeds],
        "store": said.store,
        "last_error": server.health.last_error,
    }
