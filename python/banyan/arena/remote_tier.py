# SPDX-License-Identifier: Apache-2.0
"""What other nodes have of the prompts that come to one rank, behind its arena and its store.

Invariants
  1. A prompt is asked for once, when it comes, and only for what this node does not hold.
  2. A request is awaited from the question until its end, and no longer than `PATIENCE_S`, whoever fails to answer.

A question: asked -> answered -> pulled as far as that is worth it, or dropped. One thread calls; nothing waits.
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


class FoundThere(StoreFound, Protocol):
    """What a node said to have; ``origin`` names it."""

    @property
    def origin(self) -> str: ...


class OtherNodes(Protocol):
    """The doors of other nodes, as a rank uses them. No call waits."""

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask who has the leading pages of ``keys``; the number of the question, None where nobody listens."""
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

    def arrive(self, rid: str, keys: Sequence[str], worth: Worth) -> None:
        """A request has come of whose prompt this node lacks ``keys``, which go to the prompt's end."""
        keys = keys[self._prefetch.num_arriving(keys) :]
        number = self._nodes.ask(keys) if keys else None
        if number is not None:
            self._counters.questions += 1
            self._questions[number] = _Question(rid, keys, worth)
            self._awaited[rid] = self._clock() + PATIENCE_S

    def is_awaited(self, rid: str) -> bool:
        """Whether an answer for this request may still come."""
        until_s = self._awaited.get(rid)
        if until_s is not None and until_s <= self._clock():
            del self._awaited[rid]
            return False
        return until_s is not None

    def poll(self) -> None:
        """Pull what nodes have answered to have. Never blocks."""
        for number, found in self._nodes.answers():
            question = self._questions.pop(number, None)
            if question is None:
                continue
            self._awaited.pop(question.rid, None)
            if found is not None:
                self._counters.question_hits += 1
                self._prefetch.start_pull(question.keys, question.worth, found, self._nodes.read, found.origin)

    def forget(self) -> None:
        """What is answered from now on was asked before."""
        self._questions.clear()
        self._awaited.clear()
