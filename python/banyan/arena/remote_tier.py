# SPDX-License-Identifier: Apache-2.0
"""What has to be asked for of the prompts that come to one rank: what other nodes have, or a store that does not know
by itself, behind its arena.

Invariants
  1. A prompt is asked for once, when it comes, and only for what this node does not hold.
  2. A request is awaited from the question until its end, and no longer than `PATIENCE_S`, whoever fails to answer.

A question: asked -> answered -> pulled as far as that is worth it, or dropped. One thread calls; nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from banyan.arena.page_source import Source, Wanted, Worth
from banyan.arena.prefetch import Prefetch
from banyan.ports import Asked, StoreFound
from banyan.telemetry import Counters

PATIENCE_S = 1.0
"""Longer than anybody who asks waits for answers."""


Found = TypeVar("Found", bound=StoreFound)


class RemoteTier(Source, Generic[Found]):
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
        self._questions: dict[int, Wanted] = {}
        self._answers: deque[tuple[int, Found | None]] = deque()
        self._awaited: dict[str, float] = {}  # until when

    def ask(self, wanted: Wanted) -> int:
        """A request has come: ask for what this node lacks of its prompt, as far as it knows."""
        self._put(wanted, self._asked.ask)
        return wanted.num_held

    def _put(self, wanted: Wanted, ask: Callable[[Sequence[str]], int | None]) -> bool:
        """Ask for what is not on its way; whether somebody was asked."""
        wanted = wanted.after(wanted.num_held + self._prefetch.num_arriving(wanted.missing))
        number = ask(wanted.missing) if wanted.missing else None
        if number is None:
            return False
        self._counters.questions += 1
        self._questions[number] = wanted
        self._await(wanted.request, PATIENCE_S)
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
        self._answers.extend(self._asked.answers())
        # What fails for one leaves the others for the next time.
        while self._answers:
            number, found = self._answers.popleft()
            wanted = self._questions.pop(number, None)
            if wanted is not None:
                self._await_no_longer(wanted.request)
                self._end(number, wanted, found)

    def _end(self, number: int, wanted: Wanted, found: Found | None) -> None:
        if found is not None:
            self._counters.question_hits += 1
            self._bring_rest(wanted, found)

    def _bring_rest(self, wanted: Wanted, found: Found | None) -> Wanted:
        """Bring what was found behind the pages that have come since the question; what is wanted behind them. To read
        those again would evict others for nothing."""
        num_come = self._prefetch.num_in_arena(wanted.missing)
        rest = wanted.after(wanted.num_held + num_come)
        if found is not None:
            self._bring(rest.missing, rest.worth, found.after(num_come), rest.behind)
        return rest

    def forget(self) -> None:
        """What is answered from now on was asked before."""
        self._questions.clear()
        self._awaited.clear()
