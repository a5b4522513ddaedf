# SPDX-License-Identifier: Apache-2.0
"""A request that no other process of the server can read is answered with 400.

SGLang's main process passes many of a client's values on as they came, and what has another type than the message says
raises where it is read: in the dispatcher, or in a rank, which end with all others. Here each message is read once
before it is sent, without what is large and is SGLang's own making. What a message leaves open, and a forward reckons
with, is looked at here too: places in the prompt, and vectors in the place of tokens.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

LEFT_OUT = ("input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids", "time_stats")
"""Made by SGLang of what it has checked, or looked at for each token."""


JSON_TYPES = (type(None), bool, int, float, str, list, dict)
PLACES = ("token_indices_to_pool", "multi_item_delimiter_indices")


def after_create_tokenized_object(message: Any, manager: Any, *args: Any, **named: Any) -> None:
    """
    Raises:
        BadRequest: with what cannot be read, or reckoned with.
    """
    if runtime.config() is None:
        return
    if not _is_text(message.input_text):
        raise BadRequest("text: no text")
    num_tokens = len(message.input_ids or ())
    for name in PLACES:
        _check_places(name, getattr(message, name, None), num_tokens)
    vectors = getattr(message, "positional_embed_overrides", None)
    if vectors is not None:
        _check_vectors(vectors, num_tokens, manager.model_config.hidden_size)
    small = msgspec.structs.replace(message, **{name: None for name in LEFT_OUT if hasattr(message, name)})
    try:
        msgpack_decode(msgpack_encode(small))
    except Exception as error:  # noqa: BLE001 - whatever it is, it would be raised in another process
        raise BadRequest(f"{_field_of(message, str(error))}: {error}") from None


def _is_text(said: Any) -> bool:
    return said is None or isinstance(said, str) or (isinstance(said, list) and all(map(_is_text, said)))


def _check_places(name: str, places: Any, num_tokens: int) -> None:
    if places is None:
        return
    if not isinstance(places, list) or not all(isinstance(one, int) for one in places):
        raise BadRequest(f"{name}: no list of places")
    if not places or not 0 <= min(places) <= max(places) < num_tokens:
        raise BadRequest(f"{name}: places in a prompt of {num_tokens} tokens, one or more")


def _check_vectors(vectors: Any, num_tokens: int, width: int) -> None:
    """What a client sends in their place is none; what SGLang makes of a client's lists has the size of those."""
    name = "positional_embed_overrides"
    if not isinstance(vectors, PositionalEmbeds) or isinstance(vectors.embeds, JSON_TYPES):
        raise BadRequest(f"{name}: a vector for each place")
    shape = getattr(vectors.embeds, "shape", (len(vectors.positions), width))
    if len(shape) != 2 or tuple(shape) != (len(vectors.positions), width):
        raise BadRequest(f"{name}: vectors of size {tuple(shape)}, of the model {width}, one for each place")
    _check_places(name, vectors.positions, num_tokens)


def _field_of(message: Any, error: str) -> str:
    """The name of the field: msgspec says its place in the array that is sent, behind the tag."""
    place = re.search(r"\$\[(\d+)\]", error)
    fields = msgspec.structs.fields(message)
    number = int(place[1]) - 1 if place else -1
    return fields[number].name if 0 <= number < len(fields) else "a field has another type than SGLang takes"
