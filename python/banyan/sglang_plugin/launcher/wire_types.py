# SPDX-License-Identifier: Apache-2.0
"""A request that no other process of the server can read is answered with 400.

SGLang's main process passes many of a client's values on as they came, and what has another type than the message says
raises where it is read: in the dispatcher, or in a rank, which end with all others. Here each message is read once
before it is sent, without what is large and is SGLang's own making.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

LEFT_OUT = ("input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids", "time_stats")
"""Made by SGLang of what it has checked, or looked at for each token."""


def after_create_tokenized_object(message: Any, *args: Any, **named: Any) -> None:
    """
    Raises:
        BadRequest: with what cannot be read.
    """
    if runtime.config() is None:
        return
    small = msgspec.structs.replace(message, **{name: None for name in LEFT_OUT if hasattr(message, name)})
    try:
        msgpack_decode(msgpack_encode(small))
    except Exception as error:  # noqa: BLE001 - whatever it is, it would be raised in another process
        raise BadRequest(f"{_field_of(message, str(error))}: {error}") from None


def _field_of(message: Any, error: str) -> str:
    """The name of the field: msgspec says its place in the array that is sent, behind the tag."""
    place = re.search(r"\$\[(\d+)\]", error)
    fields = msgspec.structs.fields(message)
    number = int(place[1]) - 1 if place else -1
    return fields[number].name if 0 <= number < len(fields) else "a field has another type than SGLang takes"
