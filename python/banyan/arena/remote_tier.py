# SPDX-License-Identifier: Apache-2.0
"""What has to be asked for of the prompts that come to one rank: what other nodes have, or a store that does not know
by itself, behind its arena.

Invariants
  1. A prompt is asked for once, when it comes, and only for what this node does not hold.
  2. A request is awaited from the question until its end, and no longer than `PATIENCE_S`, whoever fails to answer.

A question: asked -> answered -> pulled as far as that is worth it, or dropped. One thread calls; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from banyan.arena.prefetch import Prefetch, Worth
from banyan.ports import StoreFound
from banyan.telemetry import Counters

PATIENCE_S = 1.0
"""Longer than anybody who asks waits for answers."""


Found = TypeVar("Found", bound=StoreFound, covariant=True)


class Asked(Protocol[Found]):
    """Who is asked. No call waits."""

    def ask(self, keys: Sequence[str]) -> int | None:
        """Ask who has the leading pages of ``keys``; the number of the question, None where nobody listens."""
        ...

    def answers(self) -> Sequence[tuple[int, Found | None]]:
        """The questions that are over since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked for a request: ``keys`` go to the end of its prompt, ``behind`` are the pages before them."""

    request: str
    keys: Sequence[str]
    worth: Worth
    behind: Sequence[str]


class RemoteTier(Generic[Found]):
    """One rank's prompts at those who are ``asked``. ``bring`` starts to read what was found of some keys."""

    def __init__(
        self,
        asked: Asked[Found],
        *,
        bring: Callable[[Sequence[str], Worth, Found, Sequence[str]], None],
        prefetch: Prefetch,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._asked = asked
        self._bring = bring
        self._prefetch = prefetch
        self._counters = counters
        self._clock = clock
        self._questions: dict[int, Question] = {}
        self._awaited: dict[str, float] = {}  # until when

    def arrive(self, request: str, keys: Sequence[str], worth: Worth, behind: Sequence[str] = ()) -> None:
        """A request has come of whose prompt this node, as far as it knows, lacks ``keys``: they go to its end,
        ``behind`` the pages before them."""
        self._put(request, keys, worth, behind, self._asked.ask)

    def _put(
        self,
        request: str,
        keys: Sequence[str],
        worth: Worth,
        behind: Sequence[str],
        ask: Callable[[Sequence[str]], int | None],
    ) -> bool:
        """Ask for what of ``keys`` is not on its way; whether somebody was asked."""
        num_arriving = self._prefetch.num_arriving(keys)
        keys, behind = keys[num_arriving:], [*behind, *keys[:num_arriving]]
        number = ask(keys) if keys else None
        if number is None:
            return False
        self._counters.questions += 1
        self._questions[number] = Question(request, keys, worth, behind)
        self._await(request, PATIENCE_S)
        return True

    def _await(self, request: str, patience_s: float) -> None:
        self._awaited[request] = self._clock() + patience_s

    def is_awaited(self, request: str) -> bool:
        """Whether an answer for this request may still come."""
        until_s = self._awaited.get(request)
        if until_s is not None and until_s <= self._clock():
            self._await_no_longer(request)
            return False
        return until_s is not None

    def _await_no_longer(self, request: str) -> None:
        self._awaited.pop(request, None)

    def poll(self) -> None:
        """Bring what was answered to be there. Never blocks."""
        for number, found in self._asked.answers():
            question = self._questions.pop(number, None)
            if question is not None:
                self._await_no_longer(question.request)
                self._end(question, found)

    def _end(self, question: Question, found: Found | None) -> None:
        if found is not None:
            self._counters.question_hits += 1
            self._bring(question.keys, question.worth, found, question.behind)

    def forget(self) -> None:
        """What is answered from now on was asked before."""
        self._questions.clear()
        self._awaited.clear()
