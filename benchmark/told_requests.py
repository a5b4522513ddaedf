# SPDX-License-Identifier: Apache-2.0
"""Requests that are drawn about what caches are told to keep, and about memory that is given back: commands, hints and
marks that are well formed, with fields changed, far too large, of other tenants' prompts and sessions, and said again.

Few beginnings, salts and sessions, so that commands meet what others have told. What is kept is soon over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from banyan.routing.cache_path import CACHE_PATH
from benchmark.drawn_requests import Drawn, bounded, changed, odd_value

ACTIONS = ("pin", "retain", "prefetch", "demote", "release", "list")
LENGTHS = (1, 15, 16, 17, 64, 128, 200)
SALTS = (None, None, "a", "b", "ab")
SESSIONS = ("s0", "s1", "s2")
HUGE = (4_000, 20_000, 300_000)
"""Tokens: what the model takes, more, and a body of a megabyte."""

TTLS_S = (0.05, 0.5, 3.0, 10.0)
TTLS = ("5m", "1h", "1y", 300, None)
TAGS = ("kv_cache", "weights", "cuda_graph", "others")
MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")
_SAMPLED = {"max_new_tokens": 2, "temperature": 0}


def request(rng: random.Random, prompt: Sequence[int]) -> Drawn:
    """A request about some beginning of `prompt`, or about memory."""
    return memory(rng) if rng.random() < 0.1 else told(rng, prompt)


def told(rng: random.Random, prompt: Sequence[int]) -> Drawn:
    """A request about some beginning of `prompt`."""
    kind = rng.choice((_command, _command, _command, _hinted, _hinted, _several, _marked, _session))
    path, body = kind(rng, list(prompt))
    for _ in range(rng.choice((0, 0, 1, 2))):
        body = changed(rng, body)
    return _sent(path, body)


def memory(rng: random.Random) -> Drawn:
    """A command of a trainer, in any order and at any moment."""
    body = rng.choice(({}, {"tags": None}, {"tags": rng.choices(TAGS, k=rng.randrange(4))}, {"tags": odd_value(rng)}))
    return _sent(rng.choice(MEMORY), body)


def _sent(path: str, body: Any) -> Drawn:
    # SGLang closes some connections behind a refusal: nobody else's request is to be on one.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    return Drawn(path, headers, json.dumps(bounded(body)).encode())


def _beginning(rng: random.Random, prompt: list[int]) -> list[int]:
    return (prompt * 2000)[: rng.choice(HUGE)] if rng.random() < 0.03 else prompt[: rng.choice(LENGTHS)]


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _command(rng: random.Random, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.2:
        named: dict[str, Any] = {"text": "".join(rng.choice("ab") for _ in range(rng.choice(LENGTHS)))}
    else:
        named = {"input_ids": _beginning(rng, prompt)}
    whose = _given(cache_salt=rng.choice(SALTS), extra_key=rng.choice(SALTS))
    return CACHE_PATH, {"action": rng.choice(ACTIONS), "ttl_s": rng.choice(TTLS_S), **named, **whose}


def _hints(rng: random.Random, prompt: list[int]) -> dict[str, Any]:
    def action(number: int) -> Mapping[str, Any]:
        payload = {"ttl_s": rng.choice(TTLS_S)} if rng.random() < 0.7 else {"ttl_s": odd_value(rng)}
        if rng.random() < 0.4:
            payload["input_ids"] = _beginning(rng, prompt) if rng.random() < 0.8 else odd_value(rng)
        said = rng.choice(ACTIONS)
        return {"action_id": str(number), "action_type": said, "action_version": "1", "payload": payload}

    number = 65 if rng.random() < 0.02 else rng.randrange(1, 5)
    return {"protocol_version": "1", "message_id": "m", "actions": [action(at) for at in range(number)]}


def _hinted(rng: random.Random, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    whose = _given(cache_salt=rng.choice(SALTS), session_id=rng.choice((None, *SESSIONS)))
    if rng.random() < 0.2:
        whose["session_params"] = {"id": rng.choice(SESSIONS), "rid": None, "offset": -1, "replace": False}
    ids = prompt[: rng.choice(LENGTHS)]
    return "/generate", {"input_ids": ids, "sampling_params": _SAMPLED, "kv_hints": _hints(rng, prompt), **whose}


def _several(rng: random.Random, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    """Prompts of one request, with one set of hints, or one each."""
    hints = _hints(rng, prompt) if rng.random() < 0.5 else [_hints(rng, prompt) for _ in range(2)]
    ids = [prompt[: rng.choice(LENGTHS)] for _ in range(2)]
    return "/generate", {"input_ids": ids, "sampling_params": _SAMPLED, "kv_hints": hints}


def _marked(rng: random.Random, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    """Messages with `cache_control` here and there."""

    def marked(block: dict[str, Any]) -> dict[str, Any]:
        if rng.random() < 0.4:
            return block
        control = {"type": "ephemeral", "ttl": rng.choice(TTLS)} if rng.random() < 0.8 else odd_value(rng)
        return {**block, "cache_control": control}

    def text() -> dict[str, Any]:
        return marked({"type": "text", "text": "ab " * rng.choice(LENGTHS)})

    messages = [{"role": "user", "content": [text() for _ in range(rng.randrange(1, 3))]}]
    body = {"model": "any", "max_tokens": 2, "system": [text()], "messages": messages}
    return rng.choice(("/v1/messages", "/v1/messages/count_tokens")), marked(body)


def _session(rng: random.Random, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    name = rng.choice(SESSIONS)
    if rng.random() < 0.5:
        return "/open_session", {"capacity_of_str_len": 1000, "session_id": name}
    return "/close_session", {"session_id": name}
