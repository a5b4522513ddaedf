# SPDX-License-Identifier: Apache-2.0
"""``GET /health_ranks``, for probes: SGLang's ``/health``, and with it that no rank stands still.

``/health`` is well as soon as any rank has said anything. SGLang wants no key on paths that begin with it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from sglang.srt.entrypoints import http_server
from sglang.srt.runtime_context import get_server_args

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.clients import HEALTH_RANKS_PATH
from banyan.sglang_plugin.launcher.loads import rank_table_at


def before_setup_http(*args: Any, **named: Any) -> None:
    """SGLang is about to serve."""
    # Only of a server with Banyan are there several such processes, and they hear its arguments after this. One on
    # which Banyan does not fit has the path too: its probes ask there.
    if runtime.is_front() or runtime.was_asked_for():
        add_to(http_server.app)


def add_to(app: Any) -> None:
    if all(getattr(route, "path", None) != HEALTH_RANKS_PATH for route in app.routes):
        app.add_api_route(HEALTH_RANKS_PATH, serve, methods=["GET"], include_in_schema=False)


async def serve(request: Request) -> Response:
    num_silent = _num_silent()
    if num_silent:
        line = f"ranks that have requests and do not report: {num_silent}; the log names them\n"
        return Response(line, HTTPStatus.SERVICE_UNAVAILABLE)
    answer: Response = await http_server.health_generate(request)
    return answer


def _num_silent() -> int:
    """As the dispatcher sees it; none where it does not look."""
    if not runtime.is_sharing():
        return 0
    carried = runtime.bookkeeping(get_server_args())
    assert carried is not None
    return rank_table_at(carried["rank_table"]).num_silent
