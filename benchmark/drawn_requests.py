# SPDX-License-Identifier: Apache-2.0
"""Requests that are drawn: valid ones of every endpoint that takes prompts, with some fields changed, gone, new, or of
another type, with headers that only the server may say, and with bytes flipped and cut.

What would keep any SGLang busy for long by itself is bounded (LIMITS), and nothing that names a file or a URL is drawn:
these are SGLang's to open.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMITS = {"max_new_tokens": 16, "max_tokens": 16, "max_completion_tokens": 16, "min_new_tokens": 16, "n": 3}
"""The largest number that is sent in a field of this name, however it was drawn."""

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, -(2**63), 2**70, 0.5, -0.0, 1e308, 1e-320)
TEXTS = ("", "x", "0", "-1", "null", "\x00", "\ud800", "é" * 7, "../../etc", "{}", "[]", "a" * 5000, "\U0001f333" * 50)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], [{}], {"a": 1}, [0] * 300)
ACTIONS = (
    *("banyan.prefix", "banyan.policy", "banyan.plan", "banyan.read", "banyan.source", "banyan."),
    "other",
)
FIELDS = (
    *("rid", "session_id", "session_params", "cache_salt", "extra_key", "priority", "routed_dp_rank", "routing_key"),
    *("data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_hints", "return_logprob"),
    *("logprob_start_len", "top_logprobs_num", "return_hidden_states", "stream", "lora_path", "lora_id"),
    *("return_cached_tokens_details", "n", "stop", "logprobs", "user", "seed", "temperature", "top_p", "model"),
    *("text", "input_ids", "prompt", "messages", "sampling_params", "conversation_id", "no_logs", "background"),
)
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "frequency_penalty", "min_new_tokens"),
    *("presence_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens", "max_new_tokens", "seed"),
    *("sampling_seed", "logit_bias", "no_stop_trim", "stop_regex", "spaces_between_special_tokens"),
)
HEADERS = (
    *("x-banyan-node", "x-banyan-anything", "x-smg-routing-key", "x-data-parallel-rank"),
    *(
        "x-override-routed-dp-rank",
        "x-session-id",
        "x-request-id",
        "x-correlation-id",
        "traceparent",
        "x-custom-labels",
    ),
)


@dataclass(frozen=True)
class Drawn:
    path: str
    headers: dict[str, str]
    body: bytes


def request(rng: random.Random, prompt: Sequence[int]) -> Drawn:
    """A request about some tokens of `prompt`."""
    path, body = _valid(rng, list(prompt)[: rng.randrange(1, 60)])
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        body = changed(rng, body)
    text = json.dumps(bounded(body)).encode()
    is_garbled = rng.random() < 0.1
    if is_garbled:
        text = _garbled(rng, text)
    headers = {rng.choice(HEADERS): _header_value(rng) for _ in range(rng.choice((0, 0, 1, 2)))}
    if not is_garbled and rng.random() < 0.3:
        text = json.dumps(bounded(_warmed(body))).encode()
    # SGLang closes some connections behind a refusal: nobody else's request is to be on one.
    return Drawn(path, {**headers, "Content-Type": "application/json", "Connection": "close"}, text)


def bounded(value: Any) -> Any:
    """The same with numbers of LIMITS' fields no larger than these, wherever they stand."""
    if isinstance(value, dict):
        return {name: _within(name, bounded(inner)) for name, inner in value.items()}
    if isinstance(value, list):
        return [bounded(inner) for inner in value]
    return value


def _within(name: str, value: Any) -> Any:
    if name in LIMITS and isinstance(value, int | float) and value > LIMITS[name]:
        return LIMITS[name]
    return value


def _valid(rng: random.Random, ids: list[int]) -> tuple[str, dict[str, Any]]:
    text = "".join(rng.choice("abc de\n") for _ in range(rng.randrange(1, 80)))
    sampling = {"max_new_tokens": rng.randrange(1, 4), "temperature": 0}
    asked = {"model": "any", "max_tokens": rng.randrange(1, 4), "temperature": 0}
    messages = [{"role": "user", "content": text}]
    return rng.choice(
        [
            ("/generate", {"input_ids": ids, "sampling_params": sampling}),
            ("/generate", {"input_ids": ids, "sampling_params": sampling, "kv_hints": _hints(rng)}),
            ("/generate", {"text": text, "sampling_params": sampling, "stream": True}),
            ("/generate", {"input_ids": [ids, ids[:3]], "sampling_params": sampling, "rid": ["a", "b"]}),
            ("/v1/completions", {**asked, "prompt": ids}),
            ("/v1/completions", {**asked, "prompt": [text, text], "kv_hints": _hints(rng)}),
            ("/v1/chat/completions", {**asked, "messages": messages}),
            ("/v1/chat/completions", {**asked, "messages": messages, "stream": True, "session_id": text}),
            ("/tokenize", {"model": "any", "prompt": text}),
            ("/tokenize", {"model": "any", "messages": messages}),
        ]
    )


def _hints(rng: random.Random) -> dict[str, Any]:
    payload_fields = (
        "policy",
        "action",
        "reason",
        "text",
        "server",
        "dp_max_kv_len",
    )
    actions = [
        {
            "action_id": str(number),
            "action_type": rng.choice(ACTIONS),
            "action_version": "1",
            "payload": {rng.choice(payload_fields): odd_value(rng) for _ in range(rng.randrange(3))},
        }
        for number in range(rng.randrange(1, 4))
    ]
    return {"protocol_version": "1", "message_id": "m", "actions": actions}


def odd_value(rng: random.Random) -> Any:
    return rng.choice((*NUMBERS, *TEXTS, *OTHERS))


def changed(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """One field, at any depth, changed, gone or new."""
    body = copy.deepcopy(body)
    holder: Any = body
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        inner = [at for at in places if isinstance(holder[at], dict | list) and holder[at]]
        if not inner or rng.random() < 0.5:
            break
        holder = holder[rng.choice(inner)]
    if isinstance(holder, dict) and (not places or rng.random() < 0.5):
        holder[rng.choice(SAMPLING if "temperature" in holder and holder is not body else FIELDS)] = odd_value(rng)
    elif places and rng.random() < 0.3:
        del holder[rng.choice(places)]
    elif places:
        holder[rng.choice(places)] = odd_value(rng)
    return body


def _warmed(value: Any) -> Any:
    """The same with a temperature, where there was none: without one SGLang looks at no other sampling parameter."""
    if isinstance(value, dict):
        return {name: 1.0 if name == "temperature" and inner == 0 else _warmed(inner) for name, inner in value.items()}
    return [_warmed(inner) for inner in value] if isinstance(value, list) else value


def _garbled(rng: random.Random, text: bytes) -> bytes:
    """Cut, or with some bytes overwritten."""
    if rng.random() < 0.5:
        return text[: rng.randrange(len(text))]
    garbled = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        garbled[rng.randrange(len(garbled))] = rng.randrange(256)
    return bytes(garbled)


def _header_value(rng: random.Random) -> str:
    return rng.choice(("", "0", "1", "-1", "99", "abc", "1e9", "127.0.0.1:1", "a" * 2000, '{"a": 1}', "00-zz-01"))
