# SPDX-License-Identifier: Apache-2.0
"""``/tokenize`` also tells the tokens of a request that SGLang converts to a chat before it renders it; main process.

The request is given to SGLang's own route for it, and followed until SGLang would send its prompt to a rank. There it
stands still, its tokens are told, and it is cancelled, as if its client had gone. So the conversion, the template and
the tools are the server's own, whatever they are.

Invariants
  1. A request that is only asked about reaches no rank, and nothing of it is kept.
  2. A response that is gone on from is its tenant's. Only the router knows whose it is, and asks once it has looked:
     nobody else is told the tokens of what goes on from one, on a server with tenants.
  3. Nothing is told where the tokens do not name the pages: of images and the like, adapters, or embeddings given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from sglang.srt.entrypoints.openai.protocol import TokenizeResponse

from banyan.routing.question import FOLLOWS_FIELD, asked_about
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import tenant_salts

TIMEOUT_S = 5.0
_UNTOLD = ("image_data", "video_data", "audio_data", "input_embeds", "lora_path", "session_params")
_COPIED = ("asgi", "http_version", "scheme", "root_path", "client", "server", "state", "app")

_asked: ContextVar[asyncio.Future[list[int]] | None] = ContextVar("banyan_asked_tokens", default=None)


class TokensAnswer(TokenizeResponse):
    """An answer that says what it was asked about."""

    banyan_path: str


async def around_handle_tokenize(
    original: Callable[..., Awaitable[Any]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    """SGLang's answer, or for a question of a router the tokens; none where they are not known."""
    asked = asked_about(request.model_extra)
    if asked is None or runtime.config() is None:
        return await original(serving, adapted, request, raw_request)
    path, fields = asked
    is_answered = fields.get(FOLLOWS_FIELD) is None or tenant_salts.may_ask_for_others(raw_request)
    tokens = await _tokens_of(raw_request, path, fields) if is_answered else []
    return TokensAnswer(tokens=tokens, count=len(tokens), max_model_len=-1, banyan_path=path)


def is_only_asked_about() -> bool:
    """Whether what runs here stands for a question."""
    return _asked.get() is not None


async def tell(obj: Any, manager: Any) -> None:
    """Tell the tokens of a request that is only asked about, and stand still until it is cancelled."""
    told = _asked.get()
    assert told is not None
    try:
        tokens = _tokens(obj, manager.tokenizer)
    except (AttributeError, TypeError, ValueError):
        tokens = []
    if not told.done():
        told.set_result(tokens)
    await asyncio.Event().wait()


def _tokens(obj: Any, tokenizer: Any) -> list[int]:
    if any(getattr(obj, field, None) is not None for field in _UNTOLD):
        return []
    ids = obj.input_ids
    if ids is not None:
        return list(ids[0] if ids and isinstance(ids[0], list) else ids)
    return list(tokenizer.encode(obj.text)) if isinstance(obj.text, str) else []


async def _tokens_of(raw_request: Any, path: str, fields: Mapping[str, Any]) -> list[int]:
    told: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    mark = _asked.set(told)
    try:
        # It runs in a copy of this context: what it starts, too, knows that it is only asked about.
        following = asyncio.ensure_future(_serve(raw_request, path, json.dumps(fields).encode()))
    finally:
        _asked.reset(mark)
    try:
        await asyncio.wait((following, told), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        return told.result() if told.done() else []
    finally:
        following.cancel()
        told.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _serve(raw_request: Any, path: str, body: bytes) -> None:
    """Give a request to SGLang's routes, whose middleware the question itself has passed. Nobody reads the answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: MutableMapping[str, Any] = {name: raw_request.scope[name] for name in _COPIED if name in raw_request.scope}
    scope.update(type="http", method="POST", path=path, raw_path=path.encode(), query_string=b"")
    scope["headers"] = headers
    has_read = False

    async def receive() -> dict[str, Any]:
        nonlocal has_read
        if has_read:
            await asyncio.Event().wait()
        has_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    await AsyncExitStackMiddleware(raw_request.app.router)(scope, receive, send)
