# SPDX-License-Identifier: Apache-2.0
"""What is recorded of one request."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

CACHE_SOURCES = ("device", "peer", "host", "storage")


@dataclass
class Answer:
    """One streamed answer as the client saw it. Times are seconds since just before the request was sent.

    `output_ids` is empty where the server does not tell token ids (OpenAI API); then the text stands for
    them. `itl_s` has one gap per token after the first; tokens of one event share their gap equally. Events that come
    in one read have gaps of microseconds behind the first, so that a median of gaps can be near 0: the time of a token
    is better told by `latency_s`, `ttft_s` and the number of tokens. `error` is empty when all went well.
    """

    ttft_s: float | None = None
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_details: dict[str, int] = field(default_factory=dict)
    dp_rank: int | None = None
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Record:
    """One request of one run: who asked what, in which place of the order, and the answer."""

    script_id: str
    turn: int
    position: int
    sent_s: float
    nominal_prompt_tokens: int
    output_len: int
    answer: Answer

    @property
    def key(self) -> str:
        """Names the request across runs and servers."""
        return f"{self.script_id}#{self.turn}"

    def to_json(self) -> dict[str, Any]:
        """Flat dictionary of one JSON line; the text is replaced by its digest."""
        line: dict[str, Any] = {
            "request": self.key,
            "position": self.position,
            "sent_s": round(self.sent_s, 6),
            "nominal_prompt_tokens": self.nominal_prompt_tokens,
            "output_len": self.output_len,
        }
        line.update(asdict(self.answer))
        line["output_sha256"] = hashlib.sha256(line.pop("text").encode()).hexdigest()
        line["itl_s"] = [round(gap_s, 6) for gap_s in self.answer.itl_s]
        return line
