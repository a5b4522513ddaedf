# SPDX-License-Identifier: Apache-2.0
"""``/v1/models`` of several servers as one list."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
from starlette.responses import JSONResponse, Response

from banyan.decoding import json_of
from banyan.router.answers import error
from banyan.router.call import as_it_came
from banyan.router.paths import MODELS
from banyan.router.probes import MOST_BYTES
from banyan.whole_answer import whole

TIMEOUT_S = 10.0


async def models(session: aiohttp.ClientSession, urls: Sequence[str], headers: Mapping[str, str]) -> Response:
    """Each model of any of the servers, once; when none of them gives a list, the first refusal."""
    answers = await asyncio.gather(*(_ask(session, url, headers) for url in urls))
    lists = [answer for answer in answers if isinstance(answer, list)]
    if lists:
        cards = {str(card.get("id")): card for cards in lists for card in cards}
        return JSONResponse({"object": "list", "data": list(cards.values())})
    refusals = [answer for answer in answers if isinstance(answer, Response)]
    return refusals[0] if refusals else error("no server lists its models", "no_server", 503, {"retry-after": "1"})


async def _ask(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> list[dict] | Response | None:
    """The list, the server's refusal, or None when it did not answer as SGLang does."""
    onward = {name: as_it_came(headers[name]) for name in ("authorization",) if name in headers}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async with session.get(url + MODELS, headers=onward) as response:
                body = await whole(response, MOST_BYTES)
        if response.status != 200:
            return Response(body, response.status, media_type=response.content_type)
        cards = json_of(body)["data"]
        return [card for card in cards if isinstance(card, dict)]
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError, TypeError):
        return None
