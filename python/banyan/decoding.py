# SPDX-License-Identifier: Apache-2.0
"""Bytes of somebody else, as values, and with more in them. msgspec says in three ways that it cannot read them; here
it is one.

Besides `DecodeError` it raises UnicodeDecodeError for text that is none, and RecursionError for what is too deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

T_co = TypeVar("T_co", covariant=True)


class _Decoder(Protocol[T_co]):
    """One of msgspec's."""

    def decode(self, payload: bytes, /) -> T_co: ...


_json = msgspec.json.Decoder()


def decoded(decoder: _Decoder[T_co], payload: bytes) -> T_co:
    """
    Raises:
        msgspec.DecodeError: for anything that ``decoder`` cannot read.
    """
    try:
        return decoder.decode(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def json_of(body: bytes) -> Any:
    """
    Raises:
        msgspec.DecodeError: for anything that is no JSON, or too deep to be read.
    """
    return decoded(_json, body)


def with_last_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object with these at its end: of two fields of one name the last counts. What is no object stays as it
    is: it is for a server to refuse."""
    whole = body.rstrip()
    if not (whole.lstrip().startswith(b"{") and whole.endswith(b"}")):
        return body
    before = whole[:-1].rstrip()
    comma = b"" if before.endswith(b"{") else b","
    return before + comma + msgspec.json.encode(fields)[1:]


def printable(text: str) -> str:
    """Text of somebody else, fit for a terminal: a blank for each character that commands it, or that is none."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
