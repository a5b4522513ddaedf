# SPDX-License-Identifier: Apache-2.0
"""Each field that a server says its requests have, with each of some odd values, one at a time: what draws come upon
once in a million. Fields that name files or URLs are left out, and large numbers where they cost only time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from banyan.routing.cache_path import CACHE_PATH
from benchmark.drawn_requests import NUMBERS, OTHERS, SAMPLING, TEXTS, Drawn, bounded

VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS, [1], ["a"], [0.5], ["a", "b"], [[1, 2], [3]], "last")
HEADERS = {"Content-Type": "application/json", "Connection": "close"}
NAMES_FILES = ("image_data", "video_data", "audio_data", "encoder_urls")
_SAMPLED = {"max_new_tokens": 2, "temperature": 1.0}
_CHAT = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": "ab"}]}
VALID: Mapping[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6, 7, 8], "sampling_params": _SAMPLED},
    "/v1/completions": {"model": "any", "max_tokens": 2, "prompt": "ab"},
    "/v1/chat/completions": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/responses": {"model": "any", "max_output_tokens": 2, "input": "ab"},
    "/v1/score": {"model": "any", "query": "ab", "items": ["a"], "label_token_ids": [5]},
    "/v1/rerank": {"query": "ab", "documents": ["a"]},
    "/v1/tokenize": {"model": "any", "prompt": "ab"},
    "/v1/detokenize": {"model": "any", "tokens": [5, 6]},
    "/v1/messages/count_tokens": _CHAT,
    "/api/generate": {"model": "any", "prompt": "ab", "stream": False, "options": {"num_predict": 2}},
    "/api/chat": {**_CHAT, "stream": False, "options": {"num_predict": 2}},
    "/separate_reasoning": {"text": "ab", "reasoning_parser": "deepseek-r1"},
    "/open_session": {"capacity_of_str_len": 100},
    "/close_session": {"session_id": "none"},
    "/abort_request": {"rid": "none"},
    "/release_memory_occupation": {"tags": ["cuda_graph"]},
    "/resume_memory_occupation": {"tags": ["cuda_graph"]},
    CACHE_PATH: {"action": "retain", "input_ids": [*range(5, 40)], "ttl_s": 0.5},
}
UNTOLD = {CACHE_PATH: ("action", "input_ids", "text", "ttl_s", "cache_salt", "extra_key")}
"""Fields of paths that the server does not tell of."""


def crossed(openapi: Mapping[str, Any]) -> list[Drawn]:
    """All of them, in the order of what `/openapi.json` says."""
    return [Drawn(path, HEADERS, json.dumps(bounded(body)).encode()) for path, body in _bodies(openapi)]


def _bodies(openapi: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, body in VALID.items():
        for name in _fields(openapi, path):
            if name not in NAMES_FILES:
                # Other clients' requests are to go on.
                yield from ((path, {**body, name: value}) for value in VALUES if (name, value) != ("abort_all", True))
    for name in SAMPLING:
        for value in VALUES:
            yield "/generate", {**VALID["/generate"], "sampling_params": {**_SAMPLED, name: value}}


def _fields(openapi: Mapping[str, Any], path: str) -> Sequence[str]:
    if path in UNTOLD:
        return UNTOLD[path]
    content = openapi["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    while "$ref" in schema:
        schema = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return list(schema["properties"])
