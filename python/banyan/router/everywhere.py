# SPDX-License-Identifier: Apache-2.0
"""A request to every server: what is to happen at each of them, or at the one that knows what is asked for.

No server gets it twice, and none is left out because it takes no requests now: one that does not answer is a refusal.
So is one that has not shown that it has the tenants' secret: neither a tenant's request nor the router's word is for
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from starlette.responses import Response

from banyan.router.answers import error
from banyan.router.bodies import Refused
from banyan.router.call import Call
from banyan.router.description import UNKNOWN
from banyan.router.fleet import Server
from banyan.router.health import State
from banyan.router.paths import Row, To
from banyan.router.settings import Settings
from banyan.router.upstream import Attempt, Lost, Unreached, at


async def ask_all(
    session: aiohttp.ClientSession, servers: Sequence[Server], call: Call, settings: Settings
) -> Response:
    """One answer for all of theirs, as ``call.row.to`` says; it is passed on as it came."""
    asked = [
        asyncio.create_task(_ask(session, server, call, _patience_s(server, call.row, settings))) for server in servers
    ]
    leave_s = 0.0
    try:
        if call.row.to is To.FINDER:
            for answered in asyncio.as_completed(asked):
                if (answer := await answered).status_code < 400:
                    # Every server says so of a session that it does not have: the one that has it is still told.
                    leave_s = settings.probe_timeout_s
                    return answer
        answers = await asyncio.gather(*asked)
    finally:
        for one in asked:
            asyncio.get_running_loop().call_later(leave_s, one.cancel)
    return next((answer for answer in answers if answer.status_code >= 400), answers[0])


def _patience_s(server: Server, row: Row, settings: Settings) -> float:
    """A server that is down may hang. But what changes servers may be why it is, and takes its time."""
    is_hanging = server.health.state is not State.UP and not row.is_ours
    return settings.probe_timeout_s if is_hanging else settings.idle_timeout_s


async def _ask(session: aiohttp.ClientSession, server: Server, call: Call, timeout_s: float) -> Response:
    if call.tenant is not None and server.description is UNKNOWN:
        said = f"{server.url} was not asked: it has not shown that it has the router's tenant secret"
        return error(said, "server_lost", 502, form=call.row.form)
    attempt = Attempt(session, call.answers, idle_timeout_s=timeout_s, streams={})
    if not call.row.is_ours:
        server.in_flight[id(attempt)] = attempt.give_up
    try:
        # For head and body together.
        async with asyncio.timeout(timeout_s):
            await attempt.open(at(server.url, call.target), call.body, call.onward(), call.method)
    except (Unreached, Lost, TimeoutError) as why:
        said = f"{server.url} did not answer, and may not have done it: {str(why) or 'it takes too long'}"
        return error(said, "server_lost", 502, form=call.row.form)
    except Refused as why:
        return error(why.message, why.kind, why.status, form=call.row.form)
    finally:
        server.in_flight.pop(id(attempt), None)
        attempt.close()
    answer = Response(attempt.first, attempt.status)
    answer.raw_headers.extend(attempt.headers)
    return answer
