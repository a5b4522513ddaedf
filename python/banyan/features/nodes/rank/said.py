# SPDX-License-Identifier: Apache-2.0
"""What a router has said of a request: who reads what of its prompt, and whose arenas have more of it."""

from __future__ import annotations

from typing import Any

from banyan.routing import hint
from banyan.routing.hint import ReadHint, SourceHint
from banyan.sglang_plugin.kv_hints import payload_of
from banyan.sglang_plugin.rank import requests


def reads_of(request: str) -> ReadHint | None:
    """Who is to read what of the request's prompt, where a router has said so."""
    req = requests.find(request)
    if req is None:
        return None
    if not hasattr(req, "banyan_reads"):
        req.banyan_reads = ReadHint.read(_text(req, hint.READ_ACTION))
    reads: ReadHint | None = req.banyan_reads
    return reads


def forget_reads(request: str) -> None:
    """From now on this rank reads what the request's prompt lacks."""
    req = requests.find(request)
    if req is not None:
        req.banyan_reads = None


def source_of(request: str) -> SourceHint | None:
    """Whose arenas have more of the request's prompt, where a router has said so."""
    req = requests.find(request)
    return None if req is None else SourceHint.read(_text(req, hint.SOURCE_ACTION))


def _text(req: Any, action: str) -> object:
    payload = payload_of(getattr(req, "kv_hints", None), action)
    return None if payload is None else payload.get(hint.TEXT)
