# SPDX-License-Identifier: Apache-2.0
"""The page at ``/banyan``: one file, and two questions that it asks. It changes nothing and answers this machine only.

A browser on this machine may be made to ask for somebody else: the page answers under addresses and ``localhost``, not
under names that a stranger's DNS may point here, and runs no script but its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from banyan.observe.watched import Look, Watched

PATH = "/banyan"


class Page:
    """Routes for an application that watches ``urls``.

    Args:
        beside: what the application says of itself, for the page.
    """

    def __init__(self, urls: Sequence[str], look: Look, beside: Callable[[], dict[str, Any]] = dict) -> None:
        self._watched = [Watched(url, look) for url in urls]
        self._beside = beside

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.show),
            Route(f"{PATH}/data", self.data),
            Route(f"{PATH}/request", self.life),
        ]

    async def show(self, request: Request) -> Response:
        """The file."""
        if not is_ours(request):
            return _forbidden()
        text, policy = page_and_policy()
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", **_PLAIN}
        return HTMLResponse(text, headers=headers)

    async def data(self, request: Request) -> Response:
        """All servers, as they are now."""
        if not is_ours(request):
            return _forbidden()
        servers = await asyncio.gather(*(one.told() for one in self._watched))
        return JSONResponse({"servers": servers, **self._beside()}, headers=_PLAIN)

    async def life(self, request: Request) -> Response:
        """What is remembered of the request ``?rid=``."""
        if not is_ours(request):
            return _forbidden()
        rid = request.query_params.get("rid", "")
        lives = await asyncio.gather(*(one.lives(rid) for one in self._watched))
        return JSONResponse([life for found in lives for life in found], headers=_PLAIN)


_PLAIN = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@cache
def page_and_policy() -> tuple[str, str]:
    """The file, and the policy that lets a browser run what is in it and nothing else."""
    text = resources.files("banyan.observe").joinpath("page.html").read_text()
    script, style = (_digest(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _digest(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()


_OUR_PAGES = ("same-origin", "none")
"""What browsers say of a request (``Sec-Fetch-Site``) that our page makes, or their user: not all that other pages make
have an ``Origin``, a picture has none."""

_PROXIED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers of a request that somebody on this machine passes on for somebody else."""


def is_ours(request: Request) -> bool:
    """Whether it comes from this machine and from nobody's page but ours: it was sent to an address rather than to a
    name that may be anybody's, by no proxy, and no page of another origin has sent it."""
    headers = request.headers
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        origin = urlsplit(headers.get("origin", "")).netloc if "origin" in headers else headers.get("host", "")
    except ValueError:
        return False
    return (
        request.client is not None
        and _is_loopback(request.client.host)
        and (host == "localhost" or _is_address(host))
        and origin == headers.get("host", "")
        and headers.get("sec-fetch-site", "none") in _OUR_PAGES
        and not any(name in headers for name in _PROXIED)
    )


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _forbidden() -> Response:
    return PlainTextResponse(f"{PATH} answers this machine only, under its address or localhost\n", 403)
