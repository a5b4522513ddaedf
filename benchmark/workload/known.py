# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens are known before they are asked: each a script of one turn, under a name that stands for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmark.workload.conversation import Message, Script, Step


@dataclass(frozen=True)
class KnownPrompts:
    """Token ids by name. It is the tokenizer of its own scripts, whose only message is the name."""

    ids: Mapping[str, Sequence[int]]
    num_output_tokens: int

    @property
    def scripts(self) -> tuple[Script, ...]:
        """One for each prompt, in order."""
        return tuple(
            Script(name, (Step((Message("user", name),), self.num_output_tokens),), len(ids))
            for name, ids in self.ids.items()
        )

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that the first message names. Raises KeyError for one that is not known."""
        return list(self.ids[messages[0].content])

    def num_tokens(self, text: str) -> int:
        return len(self.ids[text])
