# SPDX-License-Identifier: Apache-2.0
"""Logs with text: OpenAI-style message lists, or single calls (``input``, ``output``, ``session_id``, ``timestamp``).

The text becomes token ids, the ids become blocks that are named by everything up to their end; then the text is
forgotten. Two prompts share exactly the blocks of their common beginning.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from banyan_lab.replay.lines import json_lines, naming
from banyan_lab.replay.trace import Trace, TraceRequest, runs_of

BLOCK_TOKENS = 16
DEFAULT_GAP_S = 10.0
DEFAULT_THINK_S = 1.0

Tokenize = Callable[[str], Sequence[int]]


def rough_tokens(text: str) -> list[int]:
    """Words and marks as 32-bit numbers: about as many as a tokenizer gives for English, and without one."""
    pieces = re.findall(r"\w{1,6}|[^\w\s]|\s{2,}", text)
    return [int.from_bytes(hashlib.blake2b(piece.encode(), digest_size=4).digest(), "little") for piece in pieces]


def load(
    path: Path, *, tokenize: Tokenize = rough_tokens, gap_s: float = DEFAULT_GAP_S, think_s: float = DEFAULT_THINK_S
) -> Trace:
    """Read a log of either form. Sessions of message lists have no times: one begins every ``gap_s``, users think
    ``think_s``.

    Raises:
        TraceError: for a line of neither form.
    """
    namer = _BlockNamer(tokenize)
    requests: list[TraceRequest] = []
    turns: dict[str, int] = {}
    start_us: float | None = None
    for number, line in json_lines(path):
        with naming(path, number, "neither messages nor a logged call"):
            if "messages" in line:
                session = str(line.get("session_id", line.get("id", number)))
                requests.extend(_replies(line["messages"], session, len(turns) * gap_s, think_s, namer))
                turns[session] = 1
                continue
            session = str(line["session_id"])
            start_us = float(line["timestamp"]) if start_us is None else start_us
            at_s = (float(line["timestamp"]) - start_us) / 1e6
            requests.append(namer.request(session, turns.get(session, 0), at_s, None, line["input"], line["output"]))
            turns[session] = turns.get(session, 0) + 1
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.name.partition(".")[0], BLOCK_TOKENS, tuple(requests))


def _replies(
    messages: Sequence[dict[str, Any]], session: str, start_s: float, think_s: float, namer: _BlockNamer
) -> Iterator[TraceRequest]:
    """One request for each message of the assistant, with all that was said before as its prompt."""
    said = ""
    turn = 0
    for message in messages:
        text = _text(message)
        if message["role"] == "assistant":
            yield namer.request(session, turn, start_s + turn * think_s, think_s if turn else None, said, text)
            turn += 1
        said += f"{message['role']}\n{text}\n"


def _text(message: dict[str, Any]) -> str:
    """What the message adds to a prompt: its content and the tools it calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls") or ()
    return content + "".join(f"\n{call['function']['name']} {call['function']['arguments']}" for call in calls)


class _BlockNamer:
    """Gives blocks of token ids numbers; equal beginnings give equal numbers."""

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize
        self._names: dict[bytes, int] = {}

    def request(
        self, session: str, turn: int, at_s: float, think_s: float | None, prompt: str, answer: str
    ) -> TraceRequest:
        ids = list(self._tokenize(prompt))
        return TraceRequest(
            session=session,
            turn=turn,
            at_s=at_s,
            num_input_tokens=max(1, len(ids)),
            num_output_tokens=max(1, len(self._tokenize(answer))),
            blocks=runs_of(self._blocks(ids)),
            think_s=think_s,
        )

    def _blocks(self, ids: list[int]) -> list[int]:
        digest = b""
        blocks = []
        for first in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = struct.pack(f"<{BLOCK_TOKENS}Q", *ids[first : first + BLOCK_TOKENS])
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            blocks.append(self._names.setdefault(digest, len(self._names)))
        return blocks
