# SPDX-License-Identifier: Apache-2.0
"""What a router asks a server that runs Banyan: the tokens of a request that only a server can make them of.

The question goes to ``/tokenize``, as one of SGLang's with an empty prompt and two more fields; the answer is one of
SGLang's that names the path beside its tokens. A server that does not know the question answers without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATH_FIELD = "banyan_path"
"""In a question and in its answer."""

REQUEST_FIELD = "banyan_request"

ASKABLE = frozenset({"/v1/messages", "/v1/responses", "/api/chat", "/api/generate"})
"""Paths whose requests a server turns into prompts in a way of its own."""

FOLLOWS_FIELD = "previous_response_id"
"""Of a request to Responses: whose prompt begins with a conversation that is not in the request."""

WITHOUT = {"stream": False, "store": False, "background": False}
"""What a request that is only asked about must not do."""


def question(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the question for a request to ``path``."""
    return {"prompt": "", PATH_FIELD: path, REQUEST_FIELD: fields}


def asked_about(extra: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """The path and the request of a question, from the fields that SGLang does not know; None for any other."""
    path, fields = (extra or {}).get(PATH_FIELD), (extra or {}).get(REQUEST_FIELD)
    if not isinstance(path, str) or path not in ASKABLE or not isinstance(fields, dict):
        return None
    return path, {**fields, **WITHOUT}
