# SPDX-License-Identifier: Apache-2.0
"""Takes lines out of what a chat says to the system, where the operator wants that. Pure.

Some clients put a line at a prompt's head that is another one in every turn, and so void every cache of the prompt.
Only what a client says for the system is looked at: its instructions, and messages of the roles system and developer.
All else of the body is passed on byte for byte, and so is a body in which no line matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import is_
from typing import Any

import msgspec

from banyan.decoding import decoded
from banyan.router.paths import MESSAGES, RESPONSES, By, Row
from banyan.router.prompt import may_read

MOST_CHARACTERS = 4096
"""Of a line that is looked at: an expression may take long for a long one."""

_SYSTEM_FIELDS = {MESSAGES: "system", RESPONSES: "instructions", "/api/chat": "system", "/api/generate": "system"}
_ROLES = ("system", "developer")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder()
_ENCODE = msgspec.json.Encoder().encode


class DroppedLines:
    """Of one request: those in which ``pattern`` is found. ``num_lines``: how many they were."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.num_lines = 0

    def without(self, row: Row, body: bytes) -> bytes:
        """The body of a request to a path without them."""
        if row.by not in (By.CHAT, By.CONVERTED) or not may_read(body):
            return body
        try:
            fields = decoded(_FIELDS, body)
            changed = dict(self._changed(row, fields))
        except msgspec.DecodeError:
            # The server's to refuse.
            return body
        return _ENCODE(fields | changed) if changed else body

    def _changed(self, row: Row, fields: dict[str, msgspec.Raw]) -> Iterator[tuple[str, msgspec.Raw]]:
        name = _SYSTEM_FIELDS.get(row.path)
        if name is not None and name in fields and (kept := self._kept(decoded(_ANY, fields[name]))) is not None:
            yield name, _raw(kept)
        turns = "input" if row.path == RESPONSES else "messages"
        if turns in fields and bytes(fields[turns]).startswith(b"["):
            items = decoded(_ITEMS, fields[turns])
            told = [self._turn(item) for item in items]
            if told != items:
                yield turns, _raw(told)

    def _turn(self, item: msgspec.Raw) -> msgspec.Raw:
        """A message; as it was where nothing of it is dropped."""
        if not bytes(item).startswith(b"{"):
            return item
        fields = decoded(_FIELDS, item)
        if "content" not in fields or "role" not in fields or decoded(_ANY, fields["role"]) not in _ROLES:
            return item
        kept = self._kept(decoded(_ANY, fields["content"]))
        return item if kept is None else _raw(fields | {"content": _raw(kept)})

    def _kept(self, content: Any) -> Any | None:
        """What is left of a text, or of parts with texts; None where nothing is dropped."""
        if isinstance(content, str):
            lines = content.split("\n")
            kept = [line for line in lines if len(line) > MOST_CHARACTERS or self._pattern.search(line) is None]
            self.num_lines += len(lines) - len(kept)
            return "\n".join(kept) if len(kept) < len(lines) else None
        if not isinstance(content, list):
            return None
        parts = [self._part(part) for part in content]
        # A part that is empty now goes, too: some servers refuse it.
        whole = [new for old, new in zip(content, parts, strict=True) if new is old or new["text"]]
        return None if all(map(is_, content, parts)) else whole or parts[:1]

    def _part(self, part: Any) -> Any:
        text = part.get("text") if isinstance(part, dict) else None
        kept = self._kept(text) if isinstance(text, str) else None
        return part if kept is None else {**part, "text": kept}


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_ENCODE(value))
