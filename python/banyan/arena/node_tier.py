# SPDX-License-Identifier: Apache-2.0
"""What other nodes have of the prompts that come to one rank, behind its arena and its store.

Invariants, beside those of ``RemoteTier``
  1. A request on an errand is awaited no longer than `ERRAND_PATIENCE_S`.
  2. What an errand does not bring is read from the own store.

An errand is a question that another node answers when it has brought the pages from its store. One thread calls;
nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from banyan.arena.prefetch import Prefetch, Worth
from banyan.arena.remote_tier import Asked, Question, RemoteTier
from banyan.ports import Frames, StoreFound, StoreRead
from banyan.telemetry import Counters

ERRAND_PATIENCE_S = 12.0
"""Longer than anybody who sends waits for the end of an errand."""


class FoundThere(StoreFound, Protocol):
    """What a node said to have; ``origin`` names it."""

    @property
    def origin(self) -> str: ...


class OtherNodes(Asked[FoundThere], Protocol):
    """The doors of other nodes, as a rank uses them. No call waits."""

    def knows(self, node: str) -> bool:
        """Whether a node of that address may be asked."""
        ...

    def ask_at(self, nodes: Sequence[str], keys: Sequence[str]) -> int | None:
        """As ``ask``, of those nodes alone."""
        ...

    def send(self, node: str, keys: Sequence[str]) -> int | None:
        """Have the node of that address bring ``keys`` from its store; the number of the question, None where it cannot
        be asked."""
        ...

    def read(self, found: Any, num_pages: int, memory: Any, offsets: Frames) -> StoreRead:
        """Start to pull what was found."""
        ...


@dataclass(frozen=True, slots=True)
class _Errand(Question):
    """``num_pages``: how many of the keys the node was sent for."""

    num_pages: int


class NodeTier(RemoteTier[FoundThere]):
    """One rank's prompts at the other nodes."""

    def __init__(
        self, nodes: OtherNodes, *, prefetch: Prefetch, counters: Counters, clock: Callable[[], float]
    ) -> None:
        super().__init__(nodes, bring=self._pull, prefetch=prefetch, counters=counters, clock=clock)
        self._nodes = nodes
        self._sent_for: set[str] = set()

    def arrive_told(
        self, request: str, keys: Sequence[str], worth: Worth, behind: Sequence[str], sources: Sequence[str]
    ) -> None:
        """As ``arrive``, of a request of which was said that only the nodes ``sources`` have what this one lacks: none
        but they are asked, and nobody where there are none. Of nodes that are not this rank's nobody has a say."""
        known = [node for node in sources if self._nodes.knows(node)]
        if sources and not known:
            self.arrive(request, keys, worth, behind)
        elif known:
            ask = partial(self._nodes.ask_at, known)
            self._counters.questions_directed += self._put(request, keys, worth, behind, ask)
        else:
            self._counters.questions_spared += bool(keys)

    def _pull(self, keys: Sequence[str], worth: Worth, found: FoundThere, behind: Sequence[str]) -> None:
        self._prefetch.start_pull(keys, worth, found, self._nodes.read, found.origin, behind)

    def send(
        self, request: str, node: str, keys: Sequence[str], num_pages: int, worth: Worth, behind: Sequence[str]
    ) -> bool:
        """Have ``node`` bring the first ``num_pages`` of ``keys``, which go to the prompt's end, ``behind`` what comes
        before; whether it was asked to. What it has brought is pulled; what it has not is read here."""
        number = self._nodes.send(node, keys[:num_pages])
        if number is None:
            return False
        self._counters.errands_sent += 1
        self._questions[number] = _Errand(request, keys, worth, behind, num_pages)
        self._await(request, ERRAND_PATIENCE_S)
        self._sent_for.add(request)
        return True

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for this request: nobody else is to read the same."""
        return request in self._sent_for and self.is_awaited(request)

    def _await_no_longer(self, request: str) -> None:
        super()._await_no_longer(request)
        self._sent_for.discard(request)

    def _end(self, question: Question, found: FoundThere | None) -> None:
        if not isinstance(question, _Errand):
            super()._end(question, found)
            return
        if found is not None:
            self._pull(question.keys, question.worth, found, question.behind)
        num_brought = 0 if found is None else found.num_pages
        self._counters.errands_failed += num_brought < question.num_pages
        self._prefetch.start_reads(question.keys, question.worth, behind=question.behind)

    def forget(self) -> None:
        super().forget()
        self._sent_for.clear()
