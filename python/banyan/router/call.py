# SPDX-License-Identifier: Apache-2.0
"""A request as a client sent it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from banyan.router.bodies import Answers
from banyan.router.paths import Row
from banyan.routing.headers import is_routers

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
"""Headers between two neighbours (RFC 9110, 7.6.1). Never passed on."""

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header may have (RFC 9110, 5.5): aiohttp sends none with them."""

LISTS = frozenset(
    "accept accept-encoding accept-language baggage cache-control connection cookie forwarded tracestate via "
    "x-forwarded-for x-forwarded-host x-forwarded-proto".split()
)
"""Headers of which several lines are one list."""

NOT_SENT_ON = HOP_BY_HOP | {"host", "content-length", "expect"}


@dataclass(frozen=True, slots=True)
class KnownTenant:
    """A request's tenant. ``salt``: of its pages. ``says``: headers by which the router tells a server."""

    name: str
    salt: str
    says: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """``target``: the path with its query, as the client wrote them: a server must not read another path in them than
    the router did. ``row``: what the table says of it. ``tenant``: None where the router knows no tenants. ``answers``:
    what comes of whole ones. ``client``: the tenant, else the address, as it counts where room is shared."""

    row: Row
    method: str
    target: str
    body: bytes
    headers: Mapping[str, str]
    answers: Answers
    tenant: KnownTenant | None = None
    client: str = ""

    def onward(self) -> dict[str, str]:
        """The headers that a server gets. A client's own word on where to read would not be this router's. And a
        compressed stream could not be ended with an event that says that it broke."""
        of_the_connection = {name.strip().lower() for name in self.headers.get("connection", "").split(",")}
        kept = {
            name: as_it_came(value)
            for name, value in self.headers.items()
            if not _is_dropped(name.lower()) and name.lower() not in of_the_connection
        }
        return {**kept, "accept-encoding": "identity", **(self.tenant.says if self.tenant is not None else {})}


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A request's headers, each once: several lines of a list are one (RFC 9110, 5.3; of cookies RFC 9113, 8.2.3). Of
    all others the first line counts, as it does at a server."""
    kept: dict[str, str] = {}
    for name, value in headers:
        if name not in kept:
            kept[name] = value
        elif name in LISTS:
            kept[name] += f"{'; ' if name == 'cookie' else ', '}{value}"
    return kept


def as_it_came(value: str) -> str:
    """A client's header as aiohttp sends its bytes: it writes UTF-8, and Starlette has read Latin-1. Other bytes than
    UTF-8 it cannot write."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def owner_of(tenant: KnownTenant | None) -> str:
    """What tells whose a response is; all clients are one where there are no tenants."""
    return tenant.name if tenant is not None else ""


def target_of(scope: Mapping[str, Any]) -> str:
    """Of a request, as ASGI has it. A line of HTTP may have a ``#``, of which no URL sends what follows: a server would
    read another path than the router did."""
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return (f"{path}?{query}" if query else path).replace("#", "%23")


def _is_dropped(header: str) -> bool:
    return header in NOT_SENT_ON or is_routers(header)
