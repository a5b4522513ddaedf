# SPDX-License-Identifier: Apache-2.0
"""The words of a workload: messages, conversations, and the scripts of requests made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """One message of a chat; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """One recorded or generated chat."""

    id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Step:
    """One request of a script: the messages it adds to what was said before, and how many tokens to
    answer."""

    messages: tuple[Message, ...]
    output_len: int


@dataclass(frozen=True)
class Script:
    """Requests that one client sends one after the other, each carrying all earlier messages and real
    answers.

    A `history` script has a single step that carries the whole context; a `session` script has one per user
    turn. `prompt_len` counts the tokens of the first step's prompt.
    """

    id: str
    steps: tuple[Step, ...]
    prompt_len: int


class ChatTokenizer(Protocol):
    """What a workload needs to know of a tokenizer."""

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the templated chat, up to where the assistant begins to answer."""
        ...

    def num_tokens(self, text: str) -> int:
        """Number of tokens of plain text."""
        ...
