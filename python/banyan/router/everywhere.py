# SPDX-License-Identifier: Apache-2.0
"""A request to every server: what is to happen at each of them, or at the one that knows what is asked for.

No server gets it twice, and none is left out because it takes no requests now: one that does not answer is a refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from starlette.responses import Response
from yarl import URL

from banyan.router.answers import error
from banyan.router.call import Call
from banyan.router.paths import To
from banyan.router.upstream import sent_back, whole


async def ask_all(session: aiohttp.ClientSession, urls: Sequence[str], call: Call, *, timeout_s: float) -> Response:
    """One answer for all of theirs, as ``call.row.to`` says; it is passed on as it came."""
    answers = await asyncio.gather(*(_ask(session, url, call, timeout_s) for url in urls))
    return answers[choose([answer.status_code for answer in answers], call.row.to)]


def choose(statuses: Sequence[int], to: To) -> int:
    """Whose answer counts."""
    counts = (lambda status: status < 400) if to is To.FINDER else (lambda status: status >= 400)
    return next((number for number, status in enumerate(statuses) if counts(status)), 0)


async def _ask(session: aiohttp.ClientSession, url: str, call: Call, timeout_s: float) -> Response:
    data = call.body if call.body or call.method == "POST" else None
    try:
        async with asyncio.timeout(timeout_s):
            to = URL(url + call.target, encoded=True)
            async with session.request(call.method, to, data=data, headers=call.onward()) as response:
                answer = Response(await whole(response), response.status)
    except (aiohttp.ClientError, TimeoutError) as why:
        said = f"{url} did not answer, and may not have done it: {type(why).__name__} {why}"
        return error(said, "server_lost", 502, form=call.row.form)
    answer.raw_headers.extend(sent_back(response.headers.items()))
    return answer
