# SPDX-License-Identifier: Apache-2.0
"""Errors that the router gives in a server's place, in the form that the client of that path reads. Pure."""

from __future__ import annotations

import json
from typing import Any

from banyan.router.paths import Form

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "request_timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; any other is an ``api_error``. Anthropic's clients decide by them whether to try again."""


def error_body(message: str, kind: str, code: int, form: Form = Form.OPENAI) -> bytes:
    """An error as the body of an answer with status ``code``."""
    return json.dumps(_error(message, kind, code, form)).encode()


def error_event(message: str, form: Form = Form.OPENAI) -> bytes:
    """The last event of a stream that broke. Nothing that ends a stream follows: the answer is not complete."""
    kind = "server_lost"
    said = _error(message, kind, 502, form)
    if form is Form.OLLAMA:
        return json.dumps(said).encode() + b"\n"
    name = b""
    if form is not Form.OPENAI:
        # Their clients pass over an event without a name.
        name = b"event: error\n"
    if form is Form.RESPONSES:
        said |= {"type": "error", "code": kind, "message": message, "param": None}
    return name + b"data: " + json.dumps(said).encode() + b"\n\n"


def _error(message: str, kind: str, code: int, form: Form) -> dict[str, Any]:
    if form is Form.ANTHROPIC:
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(code, "api_error"), "message": message}}
    if form is Form.OLLAMA:
        return {"error": message}
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
