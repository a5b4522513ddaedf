# SPDX-License-Identifier: Apache-2.0
"""What other nodes have of the prompts that come to one rank, behind its arena and its store.

Invariants
  1. A prompt is asked for once, when it comes, and only for what this node does not hold.
  2. A request is awaited from the question until its end, and no longer than `PATIENCE_S`, whoever fails to answer; on
     an errand, no longer than `ERRAND_PATIENCE_S`.
  3. What an errand does not bring is read from the own store.

A question: asked -> answered -> pulled as far as that is worth it, or dropped. An errand is a question that another
node answers when it has brought the pages from its store. One thread calls; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from banyan.arena.prefetch import Prefetch, Worth
from banyan.ports import Frames, StoreFound, StoreRead
from banyan.telemetry import Counters

PATIENCE_S = 1.0
"""Longer than anybody who asks waits for answers."""

ERRAND_PATIENCE_S = 12.0
"""Longer than anybody who sends waits for the end of an errand."""


class FoundThere(StoreFound, Protocol):
    """What a node said to have; ``origin`` names it."""

    @property
    def origin(self) -> str: ...


class OtherNodes(Protocol):
    """The doors of other nodes, as a rank uses them. No call waits."""

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask who has the leading pages of ``keys``; the number of the question, None where nobody listens."""
        ...

    def send(self, node: str, keys: Sequence[str]) -> int | None:
        """Have the node of that address bring ``keys`` from its store; the number of the question, None where it cannot
        be asked."""
        ...

    def answers(self) -> Sequence[tuple[int, FoundThere | None]]:
        """The questions that are over since the last call."""
        ...

    def read(self, found: Any, num_pages: int, memory: Any, offsets: Frames) -> StoreRead:
        """Start to pull what was found."""
        ...


@dataclass(frozen=True, slots=True)
class _Question:
    rid: str
    keys: Sequence[str]
    worth: Worth
    num_sent_for: int = 0


class RemoteTier:
    """One rank's prompts at the other nodes."""

    def __init__(
        self, nodes: OtherNodes, *, prefetch: Prefetch, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._nodes = nodes
        self._prefetch = prefetch
        self._counters = counters
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        self._awaited: dict[str, float] = {}  # until when
        self._sent_for: set[str] = set()

    def arrive(self, rid: str, keys: Sequence[str], worth: Worth) -> None:
        """A request has come of whose prompt this node lacks ``keys``, which go to the prompt's end."""
        keys = keys[self._prefetch.num_arriving(keys) :]
        number = self._nodes.ask(keys) if keys else None
        if number is not None:
            self._counters.questions += 1
            self._questions[number] = _Question(rid, keys, worth)
            self._awaited[rid] = self._clock() + PATIENCE_S

    def send(self, rid: str, node: str, keys: Sequence[str], num_pages: int, worth: Worth) -> bool:
        """Have ``node`` bring the first ``num_pages`` of ``keys``, which go to the prompt's end; whether it was asked
        to. What it has brought is pulled; what it has not is read here."""
        number = self._nodes.send(node, keys[:num_pages])
        if number is None:
            return False
        self._counters.errands_sent += 1
        self._questions[number] = _Question(rid, keys, worth, num_pages)
        self._awaited[rid] = self._clock() + ERRAND_PATIENCE_S
        self._sent_for.add(rid)
        return True

    def is_awaited(self, rid: str) -> bool:
        """Whether an answer for this request may still come."""
        until_s = self._awaited.get(rid)
        if until_s is not None and until_s <= self._clock():
            self._await_no_longer(rid)
            return False
        return until_s is not None

    def is_sent_for(self, rid: str) -> bool:
        """Whether another node is reading for this request: nobody else is to read the same."""
        return rid in self._sent_for and self.is_awaited(rid)

    def _await_no_longer(self, rid: str) -> None:
        self._awaited.pop(rid, None)
        self._sent_for.discard(rid)

    def poll(self) -> None:
        """Pull what nodes have answered to have. Never blocks."""
        for number, found in self._nodes.answers():
            question = self._questions.pop(number, None)
            if question is None:
                continue
            self._await_no_longer(question.rid)
            if found is not None:
                self._counters.question_hits += question.num_sent_for == 0
                self._prefetch.start_pull(question.keys, question.worth, found, self._nodes.read, found.origin)
            if question.num_sent_for:
                num_brought = 0 if found is None else found.num_pages
                self._counters.errands_failed += num_brought < question.num_sent_for
                self._prefetch.start_reads(question.keys, question.worth)

    def forget(self) -> None:
        """What is answered from now on was asked before."""
        self._questions.clear()
        self._awaited.clear()
        self._sent_for.clear()
