# SPDX-License-Identifier: Apache-2.0
"""Chats in the forms of their APIs, as what a router compares: text that grows at its end from turn to turn, and the
question that gives its tokens. Pure.

What is seen or heard in a chat is compared by its bytes or its address, and counts for ``MEDIUM_BYTES`` of text. No
more of it stands in the text than is compared of one: a part of a few bytes would become as much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from banyan.router.paths import MESSAGES, RESPONSES
from banyan.routing.question import PATH_FIELD, REQUEST_FIELD, question
from banyan.routing.sent import MOST_PIECES, PIECE_BYTES

_ENCODER = msgspec.json.Encoder(order="sorted")

MEDIUM_BYTES = 1024
"""For how much text an image, a video or a sound counts, as far as nobody has told its tokens: a small image's."""

MOST_MEDIA = MOST_PIECES * PIECE_BYTES // MEDIUM_BYTES
"""That stand in a text. The others are only counted."""

_MEDIA = frozenset({"image", "document", "input_image", "input_file", "input_audio", "image_url", "video_url"})
"""Types of parts of Messages and Responses that are no words."""

_NOT_ASKED = frozenset({"prompt", "stream", "stream_options", PATH_FIELD, REQUEST_FIELD})
"""Fields of a chat that are no part of the question for its tokens: the last two would ask another one, in the router's
name."""

_MOST_NESTED = 4
"""A turn -> its parts -> the result of a tool -> its parts."""


def medium(content: object) -> str:
    """``MEDIUM_BYTES`` that stand for an image, a video or a sound. The words of their addresses, or of all their
    bytes, would count for thousands of tokens that nobody computes.
    """
    said = hashlib.blake2b(_ENCODER.encode(content)).hexdigest()
    return said * (MEDIUM_BYTES // len(said))


class _Media:
    """Those of one chat."""

    def __init__(self) -> None:
        self.num = 0

    def text_of(self, content: object) -> str:
        """What stands for the next one."""
        self.num += 1
        return medium(content) if self.num <= MOST_MEDIA else ""

    @property
    def num_more_bytes(self) -> int:
        """For so much text count those that do not stand in it."""
        return max(0, self.num - MOST_MEDIA) * MEDIUM_BYTES


# ---- OpenAI's chat -------------------------------------------------------------------------------------------------


def chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A chat as text that grows at its end from turn to turn, and the fields that decide how it is rendered."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return {}
    media = _Media()
    text = b"\n".join((_ENCODER.encode(fields.get("tools")), *(_message(message, media) for message in messages)))
    # The server reads from the body what it reads from a chat completion, so that both render alike.
    tokenize = {name: value for name, value in fields.items() if name not in _NOT_ASKED}
    return {"text": text, "tokenize": None if media.num else tokenize, "num_more_bytes": media.num_more_bytes}


def _message(message: object, media: _Media) -> bytes:
    """A message of a chat, with what stands for what is seen and heard in it, where it stands."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return _ENCODER.encode(message)
    parts = [media.text_of(part) if _is_medium(part) else part for part in content]
    return _ENCODER.encode({**message, "content": parts})


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") != "text"


# ---- what a server converts to a chat ------------------------------------------------------------------------------


def converted(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A request of Messages, Responses or Ollama's. What a response follows on is not in the request: its text tells
    nothing, and only the server that made that response knows the tokens."""
    follows = fields.get("previous_response_id") if path == RESPONSES else None
    turns = _turns(path, fields)
    if not turns:
        # SGLang answers what has nothing but an earlier response, too.
        return {"follows": follows} if isinstance(follows, str) else {}
    media = _Media()
    rows = [_words(turn, _MOST_NESTED, media) for turn in turns]
    tokenize = None if media.num else question(path, fields)
    if isinstance(follows, str):
        return {"tokenize": tokenize, "follows": follows}
    text = b"\n".join(map(_ENCODER.encode, rows))
    return {"text": text, "tokenize": tokenize, "num_more_bytes": media.num_more_bytes}


def _turns(path: str, fields: Mapping[str, Any]) -> list[Any]:
    """What of a request comes into the prompt, in that order; none when there is no chat in it."""
    if path == MESSAGES:
        return _after([fields.get("tools"), fields.get("system")], fields.get("messages"))
    if path == RESPONSES:
        asked = fields.get("input")
        head = [fields.get("tools"), fields.get("instructions")]
        return _after(head, [asked] if isinstance(asked, str) else asked)
    prompt = fields.get("prompt")
    return _after([fields.get("system")], [prompt] if isinstance(prompt, str) else fields.get("messages"))


def _after(head: list[Any], turns: object) -> list[Any]:
    return [*head, *turns] if isinstance(turns, list) and turns else []


def _words(value: object, depth: int, media: _Media) -> object:
    """A value with what stands for what is no words in it. Without the marks of what is to be cached: they move from
    turn to turn."""
    if isinstance(value, dict):
        if isinstance(kind := value.get("type"), str) and kind in _MEDIA:
            return media.text_of(value)
        if depth:
            return {name: _words(one, depth - 1, media) for name, one in value.items() if name != "cache_control"}
    if isinstance(value, list) and depth:
        # A list and what is in it are one step.
        return [_words(one, depth, media) if isinstance(one, dict) else one for one in value]
    return value
