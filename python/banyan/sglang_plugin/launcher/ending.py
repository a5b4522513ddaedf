# SPDX-License-Identifier: Apache-2.0
"""A server that was told to end takes nothing new: 503 at once, and a router asks another server.

SGLang looks only now and then whether all is answered, then ends its ranks and waits for its connections. What came
between the two was sent to nobody, and kept the server from its end until it was killed. So did a command that was
under way: who waits for its answer is let go when the ranks have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints import http_server
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import all_ranks
from banyan.sglang_plugin.launcher.clients import HEALTH_PATHS, route_of

ANSWERED_HERE = frozenset(
    ("/", *HEALTH_PATHS, "/ready", "/ping", "/v1/loads", "/v1/models", "/model_info", "/get_model_info")
)
ANSWERED_BELOW = ("/metrics", "/v1/models/", "/v1/responses/")
"""Whatever has become of the ranks; all routes that begin so."""

ENDS = "this server was told to end, and takes no new requests"

END_SOONER = frozenset(("/abort_request", "/continue_generation"))
"""What runs, and what stands still; nobody waits for an answer of the ranks."""


def before_setup_http(*args: Any, **named: Any) -> None:
    """SGLang is about to serve."""
    if runtime.config() is not None:
        add_to(http_server.app)


def refuse_beside_http(request: Any, manager: Any) -> None:
    """Of a prompt that came by gRPC, from a program, or as the next part of a sound by a socket. One by HTTP has passed
    by ``EndRefusal``: what it has begun, and asks for in several prompts, is answered.

    Raises:
        HTTPException: where this server was told to end. SGLang waits for as long as it has anything to answer.
    """
    if not hasattr(request, "scope") and manager.gracefully_exit and runtime.config() is not None:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, ENDS)


def around_set_server_stop_hook(original: Callable[..., None], manager: Any, hook: Callable[[], None]) -> None:
    """SGLang calls ``hook`` when its ranks have ended."""

    def stop() -> None:
        all_ranks.let_go()
        hook()

    original(manager, hook if runtime.config() is None else stop)


def add_to(app: Any) -> None:
    if all(one.cls is not EndRefusal for one in app.user_middleware):
        app.add_middleware(EndRefusal)


class EndRefusal:
    """In front of SGLang's application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _refusal() if _asks_ranks(scope) and _ends() else self._app
        await answer(scope, receive, send)


def _asks_ranks(scope: Scope) -> bool:
    route = route_of(scope)
    needs_none = scope["type"] == "lifespan" or route in ANSWERED_HERE | END_SOONER or route.startswith(ANSWERED_BELOW)
    return not needs_none


def _ends() -> bool:
    return bool(http_server.get_global_state().tokenizer_manager.gracefully_exit)


def _refusal() -> ASGIApp:
    error = {"message": ENDS, "type": "server_ends", "code": HTTPStatus.SERVICE_UNAVAILABLE.value}
    return JSONResponse({"error": error}, HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "1"})
