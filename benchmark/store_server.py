# SPDX-License-Identifier: Apache-2.0
"""What the store's server benchmarks share: prompts of plain words, a server on a store, and one timed request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from banyan.planner import Action
from benchmark.engine import Engine
from benchmark.processor import CPU_ENGINE
from benchmark.servers import Server, ServerSpec, cpu_env, wait_ready
from benchmark.workload.generated import ChatShape, generate_conversations


def prompts(model: Path, lengths: Sequence[int], *, seed: int) -> list[list[int]]:
    """Token ids of plain text, one prompt for each length; no two share a page."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    shape = ChatShape(num_turns=2, mean_question_words=50, mean_answer_words=max(lengths), spread=0.05)
    made = []
    for number, (length, chat) in enumerate(
        zip(lengths, generate_conversations(len(lengths), seed=seed, shape=shape), strict=True)
    ):
        text = f"Chat {seed}-{number}. " + " ".join(message.content for message in chat.messages)
        ids = tokenizer(text)["input_ids"][:length]
        assert len(ids) == length, f"{len(ids)} tokens of text for {length}"
        made.append(ids)
    return made


@dataclass(frozen=True)
class Answer:
    """One request's answer. ``ttft_s`` is the client's time to an answer of one token, connection included."""

    tokens: tuple[int, ...]
    details: dict[str, int]
    ttft_s: float


class StoreServer:
    """One server on a store; ``ask`` times one request at a time."""

    def __init__(self, label: str, store: Path, model: Path, logs: Path, *, dp: int, args: Sequence[str]) -> None:
        flags = ("--banyan-store", str(store), "--banyan-store-admit", "first", *args)
        common = (*CPU_ENGINE, "--context-length", "8192", "--sleep-on-idle", "--page-size", "16")
        self._server = Server(ServerSpec(label, dp, "on", (*common, *flags), cpu_env(dp=dp)), model, logs)

    def __enter__(self) -> StoreServer:
        try:
            wait_ready([self._server])
        except BaseException:
            self._server.stop()
            raise
        self.engine = Engine(self._server.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def ask(
        self,
        ids: Sequence[int],
        *,
        rank: int,
        num_tokens: int = 1,
        action: Action | None = None,
        salt: str | None = None,
    ) -> Answer:
        """Greedy tokens; a salt makes a prompt that nobody has seen of one that somebody has."""
        start_s = time.perf_counter()
        answer = self.engine.generate(ids, rank=rank, num_tokens=num_tokens, action=action, cache_salt=salt)
        elapsed_s = time.perf_counter() - start_s
        return Answer(tuple(answer["output_ids"]), answer["meta_info"]["cached_tokens_details"] or {}, elapsed_s)

    def total(self, counter: str) -> int:
        """A counter over all ranks."""
        return sum(rank[counter] for rank in self.engine.ranks().values())

    def wait_stored(self, num_pages: int, *, timeout_s: float = 120) -> int:
        """Wait until so many pages are durable; how many are."""
        deadline = time.monotonic() + timeout_s
        while (stored := self.total("archived_pages")) < num_pages and time.monotonic() < deadline:
            time.sleep(0.5)
        return stored
