# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of words, and answers out of thin air."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.measure import RunResult
from benchmark.metrics import summarise
from benchmark.records import Answer, Record
from benchmark.workload.conversation import Conversation, Message


class WordTokenizer:
    """One token a word; a chat is its words and one token for each message and for the answer to come."""

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        return list(range(sum(1 + self.num_tokens(message.content) for message in messages) + 1))

    def num_tokens(self, text: str) -> int:
        return len(text.split())


def chat(identity: str, *texts: str, first: str = "user") -> Conversation:
    """A conversation of alternating speakers."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return Conversation(identity, tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)))


def record(name: str = "a", *, position: int = 0, **answer: object) -> Record:
    """A record of one request; keyword arguments go into its answer."""
    fields = {
        "ttft_s": 0.5,
        "latency_s": 1.0,
        "prompt_tokens": 100,
        "completion_tokens": 6,
        "output_ids": [1, 2, 3],
        **answer,
    }
    return Record(name, 0, position, 0.0, 100, 6, Answer(**fields))  # type: ignore[arg-type]


def run_result(label: str, run: int, repetition: int = 1, *records: Record) -> RunResult:
    """A run of `records`, of one record when none is given."""
    played = list(records or (record(),))
    summary = summarise(played, total_time_s=2.0)
    return RunResult(label, run, repetition, [r.script_id for r in played], played, summary)
