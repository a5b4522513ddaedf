# SPDX-License-Identifier: Apache-2.0
"""What the router reads of a request. The body itself is passed on byte for byte; ``pin`` adds one field to it.

Nothing here refuses: a body that cannot be read is the server's to refuse, in its own words.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from banyan.decoding import json_of, with_last_fields
from banyan.router.blocks import pack
from banyan.router.chats import chat, converted, medium
from banyan.router.paths import BY_PATH, COMPLETIONS, MESSAGES, OTHER, RESPONSES, By, Row
from banyan.routing.conversation import conversation_of, name_of
from banyan.routing.sent import BYTES_PER_TOKEN
from banyan.routing.tenant_secret import salted

RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
"""Fields that pin a rank; the second is the old name of the first."""

RANK_HEADERS = ("x-data-parallel-rank", "x-override-routed-dp-rank")
"""Headers that do; which of them counts depends on the endpoint and on the server's environment."""

ROUTING_KEY_HEADER = "x-smg-routing-key"

MOST_READ_BYTES = 16 << 20
"""A million tokens as numbers take half of it."""

MOST_CONTAINERS = 1 << 17
"""Lists and objects of a body. msgspec lets nothing else run while it reads: so many take it some ten milliseconds, and
what 16 MiB have room for takes seconds. A long conversation with many tools has some thousands."""

MOST_QUOTES = 1 << 20
"""Twice as many as strings, for the same reason."""

MOST_COMMAS = 5 << 18
"""As many as numbers, for the same reason: a million tokens, and what stands beside them."""

MOST_NAME_CHARS = 256
"""Of a client's name for something; a longer one is called by its hash."""

MOST_SESSION_BYTES = 4 << 10
"""Of an answer that is a session's name and nothing else."""

_MEDIA = ("image_data", "audio_data", "video_data")
"""Fields of ``/generate`` whose content is in the pages and not in the prompt's tokens."""

_NAMES_MODEL = ("/v1/", "/invocations")
"""How paths begin whose requests name one that counts."""

_PROMPT_FIELDS = {COMPLETIONS: "prompt", "/v1/embeddings": "input", "/v1/classify": "input"}
"""Where a prompt stands, if not as in ``/generate``."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, as far as placing it needs.

    Attributes:
        token_ids: of the prompt, where the client gave them.
        text: the prompt as text, or None; it tokenises as ``tokenize`` says.
        tokenize: body for a server's ``/tokenize``, or None where the tokens would not tell what is cached.
        num_others: further prompts of a batch, which is placed by its first.
        session: names the conversation; None when the client does not say.
        follows: the id of the response that it goes on from; only the server that made it has it.
        cache_salt: keeps equal prompts apart; None for none.
        namespace: everything that keeps equal prompts apart, as text; "" for nothing.
        may_pin: whether the rank is the router's to name; a client's own pin stays.
        is_read: whether the body could be read, where it tells anything.
        names_response: whether the client gives the response its id.
        is_kept: whether the server may keep its response: not if the client says ``"store": false``.
        num_more_bytes: of the prompt, behind ``text``, and of the others: they count, and are compared with nothing.
    """

    token_ids: array[int] | None = None
    text: bytes | None = None
    tokenize: Mapping[str, Any] | None = None
    num_others: int = 0
    session: str | None = None
    follows: str | None = None
    cache_salt: str | None = None
    namespace: str = ""
    may_pin: bool = False
    is_read: bool = False
    names_response: bool = False
    is_kept: bool = True
    num_more_bytes: int = 0

    @property
    def is_salted_only(self) -> bool:
        """Whether events name its pages in a way that can be computed here: LoRA and extra keys are not."""
        return self.namespace == (self.cache_salt or "")

    def row(self) -> bytes | None:
        """The prompt as the row of bytes that ``sent`` cuts; None when nothing is known of it."""
        return self.token_ids.tobytes() if self.token_ids is not None else self.text


def read(
    path: str, body: bytes, headers: Mapping[str, str], tenant_salt: str | None = None, models: Collection[str] = ()
) -> Request:
    """Read a request to ``path``; one that says nothing is placed by load alone, and so is one that may not be
    read (``may_read``): that would hold all others up. ``tenant_salt``: None where there are no tenants. ``models``:
    the names under which servers serve theirs."""
    row = BY_PATH.get(path, OTHER)
    said = partial(_request, row, headers, tenant_salt, models)
    try:
        return said(_fields(body) if row.by not in (By.LOAD, By.NOTHING) else {})
    except RecursionError:
        # What is only just not too deep to be read may be too deep to be written.
        return said({})


def _request(
    row: Row, headers: Mapping[str, str], tenant_salt: str | None, models: Collection[str], fields: Mapping[str, Any]
) -> Request:
    path = row.path
    # Messages have neither, and SGLang passes over them.
    salt = _salt(fields) if path != MESSAGES else None
    session = _session(fields, headers)
    if tenant_salt is not None:
        salt = salted(tenant_salt, salt)
        session = f"{tenant_salt} {session}" if session is not None else None
    names = () if path == MESSAGES else ("extra_key", "lora_path", "lora_name")
    apart = [*(_name(fields[name]) for name in names if fields.get(name)), *_adapter(path, fields, models)]
    return Request(
        **_prompt(path, row.by, fields),
        session=session,
        cache_salt=salt,
        namespace="\0".join([salt or "", *apart]),
        may_pin=row.is_routable
        and bool(fields)
        and all(fields.get(name) is None for name in RANK_FIELDS)
        and not any(name in headers for name in RANK_HEADERS),
        is_read=bool(fields),
        names_response=fields.get("request_id") is not None,
        is_kept=fields.get("store") is not False,
    )


def _adapter(path: str, fields: Mapping[str, Any], models: Collection[str]) -> list[str]:
    """What may name a LoRA adapter in ``model`` (MODEL:ADAPTER), where SGLang looks there for one; the name of a model
    may have a colon, too."""
    model = fields.get("model") if path.startswith(_NAMES_MODEL) else None
    return [_name(model)] if isinstance(model, str) and ":" in model and model not in models else []


def _name(said: object) -> str:
    """What a client calls something, in few words: it may be anything, and is kept and compared."""
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return text if len(text) <= MOST_NAME_CHARS else name_of(text)


def _salt(fields: Mapping[str, Any]) -> str | None:
    """That of the first prompt: a batch is placed by it."""
    salt = fields.get("cache_salt")
    salt = salt[0] if isinstance(salt, list) and salt else salt
    return salt if isinstance(salt, str) else None


def num_brackets(body: bytes) -> int:
    """No fewer than its lists and objects: a prompt's text has brackets, too."""
    return body.count(b"[") + body.count(b"{")


def num_commas(body: bytes) -> int:
    """No fewer than its numbers, but for one of each list or object."""
    return body.count(b",")


def may_read(body: bytes) -> bool:
    """Whether it is read in so short a time that others can wait for it."""
    if len(body) > MOST_READ_BYTES or body.count(b'"') > MOST_QUOTES:
        return False
    return _has_few_values(body) or _has_few_values(_without_strings(body))


def _has_few_values(body: bytes) -> bool:
    return num_brackets(body) <= MOST_CONTAINERS and num_commas(body) <= MOST_COMMAS


def _without_strings(body: bytes) -> bytes:
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(unescaped.split(b'"')[::2])


def _fields(body: bytes) -> dict[str, Any]:
    """Of a body that is an object, and may be read."""
    if not may_read(body):
        return {}
    try:
        fields = json_of(body)
    except msgspec.DecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _prompt(path: str, by: By, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What tells the prompt: fields of ``Request``."""
    if by is By.CHAT:
        return chat(fields)
    if by is By.CONVERTED:
        return converted(path, fields)
    if by is not By.TOKENS:
        return {}
    if path in _PROMPT_FIELDS:
        return _completion(fields, _PROMPT_FIELDS[path])
    prompt = _completion(fields, "input_ids" if fields.get("input_ids") is not None else "text")
    if fields.get("input_embeds") is not None:
        return {}
    media = [fields.get(name) for name in _MEDIA]
    return prompt if media == [None] * len(media) else _with_media(prompt, media)


def pin(body: bytes, rank: int) -> bytes:
    """The body of a request that ``may_pin``, with its rank as the last field: of two that have one name the last
    counts, and the client may have sent a null."""
    return with_last_fields(body, {RANK_FIELDS[0]: rank})


def renamed(body: bytes, path: str) -> bytes:
    """The body of a request with another id than its client has given it, as the last field. A server whose client has
    gone knows its id for seconds, refuses a second one of that name, and then ends every one whose id begins so."""
    name, begin = ("request_id", "resp_") if path == RESPONSES else ("rid", "~")
    if f'"{name}"'.encode() not in body:
        return body
    return with_last_fields(body, {name: f"{begin}{secrets.token_hex(16)}"})


def _completion(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The prompt of a completion: text, token ids, or a list of either."""
    prompt, others = fields.get(name), []
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt, *others = prompt
    more = {"num_others": len(others), "num_more_bytes": sum(map(_num_bytes, others))}
    if isinstance(prompt, str):
        return {"text": prompt.encode(errors="replace"), "tokenize": {"prompt": prompt}, **more}
    token_ids = pack(prompt)
    return {"token_ids": token_ids, **more} if token_ids else {}


def _num_bytes(prompt: object) -> int:
    """About as many as its row would have, and a token's at least."""
    if isinstance(prompt, str):
        return max(BYTES_PER_TOKEN, len(prompt))
    return BYTES_PER_TOKEN * max(1, len(prompt)) if isinstance(prompt, list) else BYTES_PER_TOKEN


def _with_media(prompt: Mapping[str, Any], media: list[Any]) -> dict[str, Any]:
    """A prompt that its tokens do not tell, as text: what is seen and heard first, so that equal words about something
    else have nothing in common.
    """
    words = prompt.get("text")
    if words is None:
        words = prompt["token_ids"].tobytes() if "token_ids" in prompt else b""
    more = {name: prompt.get(name, 0) for name in ("num_others", "num_more_bytes")}
    return {"text": medium(media).encode() + words, **more}


def opened_session(answer: bytes) -> str | None:
    """The session that a server's answer names, as later requests name it; None where there is none in it."""
    try:
        session = json_of(answer) if len(answer) <= MOST_SESSION_BYTES else None
    except msgspec.DecodeError:
        return None
    return _name(session) if isinstance(session, str) and session else None


def _session(fields: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """As the engine's dispatcher: SGLang's session, else the routing key, else what is said by the way."""
    params = fields.get("session_params")
    names = (fields.get("session_id"), params.get("id") if isinstance(params, dict) else None)
    named = next((name for name in names if name is not None), None)
    return _name(named) if named is not None else headers.get(ROUTING_KEY_HEADER) or conversation_of(fields, headers)
