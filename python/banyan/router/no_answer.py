# SPDX-License-Identifier: Apache-2.0
"""What a client is told for whom no server has answered."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from banyan.router.forms import error_body
from banyan.router.paths import Form
from banyan.router.suspects import WHY_HELD, Held
from banyan.router.verdict import Tried, account


def no_place(status: int, message: str, tried: Sequence[Tried], form: Form, *, retry_after_s: int) -> Response:
    """No server was asked, or none any more: 429 or 503."""
    message = f"{message}; tried before: {account(tried)}" if tried else message
    kind = "queue_full" if status == 429 else "no_server"
    headers = {"retry-after": str(retry_after_s)}
    return Response(error_body(message, kind, status, form), status, headers, "application/json")


def kept(held: Held, tried: Sequence[Tried], form: Form) -> Response:
    """It was lost with a server, and goes to no other."""
    message = f"{account(tried)}; {WHY_HELD[held]}" if tried else WHY_HELD[held]
    # Clients that try again by themselves would bring it to the next server.
    headers = {"x-should-retry": "false"}
    return Response(error_body(message, "server_lost", 502, form), 502, headers, "application/json")


def all_lost(tried: Sequence[Tried], form: Form) -> Response:
    """Every server that was tried failed."""
    message = f"no server answered: {account(tried)}"
    return Response(error_body(message, "server_lost", 502, form), 502, media_type="application/json")
