# SPDX-License-Identifier: Apache-2.0
"""What a router says to a server in the headers of a request: OpenAI's bodies have no place for it."""

from __future__ import annotations

PLAN_HEADER = "x-banyan-plan"
"""Asks a server for what is to be done with what its caches hold: OpenAI's bodies have no place for hints."""

READ_HEADER = "x-banyan-read"
"""Says who reads what of the prompt (``routing.hint.ReadHint``)."""

SOURCE_HEADER = "x-banyan-source"
"""Says whose arenas have more of the prompt (``routing.hint.SourceHint``)."""

TENANT_HEADER = "x-banyan-tenant"
"""Says whose the request is (``routing.tenant_secret.TenantSecret``)."""

TENANT_NAME_HEADER = "x-banyan-tenant-name"
"""Says, beside that, under which name the request is counted."""

HEADER_PREFIX = "x-banyan-"
"""Of all that Banyan's servers hear."""


def is_routers(header: str) -> bool:
    """Whether only a router says this: it drops a client's own word. A client may ask to have its prompt computed."""
    return header.startswith(HEADER_PREFIX) and header != PLAN_HEADER
