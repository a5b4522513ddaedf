# SPDX-License-Identifier: Apache-2.0
"""An abort ends the request that it names. In SGLang it ends all whose ids begin alike, whoever has sent them: a client
that calls its own request ``a`` and goes away would end every sixteenth request of the server.

Invariants
  1. Only the request of that id is ended, and those that were made of it (``abort_ids``).
  2. Each request is called as before when this is over, whatever SGLang raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.abort_ids import is_meant
from banyan.sglang_plugin.rank import requests

_OUT_OF_REACH = "\0"
"""Before an id while an abort is about that is not meant for it."""


def around_abort_request(original: Callable[..., None], scheduler: Any, asked: Any) -> None:
    spared = [] if runtime.config() is None or asked.abort_all else _not_meant(asked.rid)
    try:
        for req in spared:
            req.rid = _OUT_OF_REACH + req.rid
        original(scheduler, asked)
    finally:
        for req in spared:
            req.rid = req.rid.removeprefix(_OUT_OF_REACH)


def _not_meant(rid: str) -> list[Any]:
    return [req for req in requests.all_known() if req.rid.startswith(rid) and not is_meant(req.rid, rid)]
