# SPDX-License-Identifier: Apache-2.0
"""Reads chats from any ShareGPT-format file: a JSON list or JSON lines, plain or gzipped.

An entry holds `conversations` (`from`, `value`) or OpenAI-style `messages` (`role`, `content`). What cannot
be used (tools, images, empty texts, unknown speakers) is left out; an entry without any usable message is
skipped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark.workload.conversation import Conversation, Message

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class DatasetError(ValueError):
    """The file is not a ShareGPT-format data set; the message says where and why."""


def load_conversations(path: Path) -> list[Conversation]:
    """All usable conversations of `path`, in file order. Raises DatasetError for a file that holds none."""
    conversations = [
        conversation
        for number, entry in enumerate(_entries(path))
        if (conversation := _conversation(entry, number)) is not None
    ]
    if not conversations:
        raise DatasetError(f"{path}: no entry with `conversations` or `messages`")
    return conversations


def openings(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Only chats that begin at their beginning: ShareGPT files cut long chats into `<id>_0`, `<id>_89`,
    ..."""
    return [
        conversation
        for conversation in conversations
        if "_" not in conversation.id or conversation.id.rsplit("_", 1)[1] == "0"
    ]


def file_of(path: Path) -> Path:
    """``path``, or what a folder has of ShareGPT. Raises DatasetError for a folder without."""
    if not path.is_dir():
        return path
    found = sorted(path.rglob("*[sS]hare[gG][pP][tT]*.json*"))
    if not found:
        raise DatasetError(f"{path}: no file there is called sharegpt*.json, .jsonl or .gz")
    return found[0]


def _entries(path: Path) -> Iterator[Any]:
    path = file_of(path)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except ValueError as error:
            raise DatasetError(f"{path}: not a JSON list: {error}") from error
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path}:{number}: not a JSON line: {error}") from error


def _conversation(entry: Any, number: int) -> Conversation | None:
    if not isinstance(entry, dict):
        return None
    raw = entry.get("conversations") or entry.get("messages") or ()
    messages = tuple(message for item in raw if (message := _message(item)) is not None)
    if not messages:
        return None
    identity = entry.get("id", entry.get("session_id"))
    return Conversation(id=str(number if identity is None else identity), messages=messages)


def _message(item: Any) -> Message | None:
    if not isinstance(item, dict):
        return None
    role = ROLES.get(str(item.get("from", item.get("role", ""))))
    content = item.get("value", item.get("content"))
    if role is None or not isinstance(content, str) or not content.strip():
        return None
    return Message(role=role, content=content)
