# SPDX-License-Identifier: Apache-2.0
"""``cache_control`` of Anthropic's Messages: for how long a client wants its prompt kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TTLS_S = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"


def ttl_s_of(fields: Mapping[str, Any]) -> float | None:
    """The longest time that a request names anywhere; None where it names none. What is malformed names none: SGLang
    passes over it, too."""
    named = (_ttl_s(block) for block in _blocks(fields))
    return max((ttl_s for ttl_s in named if ttl_s is not None), default=None)


def _blocks(fields: Mapping[str, Any]) -> Iterator[Any]:
    """All that may carry it, in any order."""
    yield fields
    yield from _list(fields.get("system"))
    yield from _list(fields.get("tools"))
    for message in _list(fields.get("messages")):
        for block in _content(message):
            yield block
            # What a tool has found.
            yield from _content(block)


def _content(one: Any) -> list[Any]:
    return _list(one.get("content") if isinstance(one, Mapping) else None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ttl_s(block: Any) -> float | None:
    control = block.get("cache_control") if isinstance(block, Mapping) else None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        return None
    ttl = control.get("ttl", DEFAULT_TTL)
    return TTLS_S.get(ttl) if isinstance(ttl, str) else None
