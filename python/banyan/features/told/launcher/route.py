# SPDX-License-Identifier: Apache-2.0
"""``POST /banyan/cache``: tell a server's cache of a prompt that nobody asks for now.

It is a client's path, as ``/generate``: where a gateway sets ``cache_salt``, it has to set it here as well. On a server
with tenants it is theirs, by their router.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints import http_server

from banyan.features.told.command import Command
from banyan.features.told.launcher.telling_ranks import TIMEOUT_S, Busy, check, deadline_s, tell
from banyan.features.told.table import Refused
from banyan.routing.cache_path import CACHE_PATH
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import adapters, tenant_salts

FIELDS = frozenset({"action", "input_ids", "text", "ttl_s", "cache_salt", "extra_key"})


def before_setup_http(*args: Any, **named: Any) -> None:
    """SGLang is about to serve."""
    # Only of a server with Banyan are there several such processes, and they hear its arguments after this.
    if runtime.is_front() or runtime.config() is not None:
        add_to(http_server.app)


def add_to(app: Any) -> None:
    if all(getattr(route, "path", None) != CACHE_PATH for route in app.routes):
        app.add_api_route(CACHE_PATH, serve, methods=["POST"], include_in_schema=False)


async def serve(request: Request) -> JSONResponse:
    """One command, told to all ranks."""
    manager = http_server.get_global_state().tokenizer_manager
    try:
        if not runtime.is_sharing():
            raise Refused("this server shares nothing: start it with --enable-banyan")
        command = _command(await request.json(), manager)
        command = msgspec.structs.replace(command, cache_salt=tenant_salts.salt_for(request, command.cache_salt))
        command.check()
        return JSONResponse({"action": command.action, **await tell(manager, command, deadline_s(TIMEOUT_S))})
    except Busy as busy:
        return _refusal(str(busy), HTTPStatus.SERVICE_UNAVAILABLE)
    except Refused as refused:
        return _refusal(str(refused), HTTPStatus.CONFLICT)
    except ValueError as error:
        return _refusal(str(error), HTTPStatus.BAD_REQUEST)


def _command(body: Any, manager: Any) -> Command:
    if not isinstance(body, dict) or not set(body) <= FIELDS:
        raise ValueError(f"an object of {', '.join(sorted(FIELDS))}")
    fields = dict(body)
    text, ids = fields.pop("text", None), fields.get("input_ids")
    if text is not None:
        if ids is not None or not isinstance(text, str) or manager.tokenizer is None:
            raise ValueError("text: a prompt, where none is given as input_ids and the server has a tokenizer")
        # Tokenizers fail at what is no Unicode, each in its own way.
        text.encode()
        fields["input_ids"] = list(manager.tokenizer.encode(text))
    command = Command.of(fields)
    check(command, manager)
    if adapters.named_by(command.extra_key, manager):
        raise ValueError("extra_key: it contains the id of a LoRA adapter")
    return command


def _refusal(line: str, status: HTTPStatus) -> JSONResponse:
    return JSONResponse({"error": {"message": line, "type": "cache_refused", "code": status.value}}, status)
