# SPDX-License-Identifier: Apache-2.0
"""Which nodes are asked for a prompt, and when the asking is over: pure, the clock is the caller's.

Invariants
  1. Every question that was begun is over once: when all who were asked have answered; after `PATIENCE_S` without a
     word, or `SILENCE_S` after the last word of one that is reading for this rank (a remote prefetch); or after
     `MOST_READ_S`, however alive its node is.
  2. A node that did not answer in time is silent: it is asked nothing but whether it is there, ever more seldom, until
     it says so in time. So a dead node, or one that is always late, costs one wait, not one for each request.
  3. A node that ``rests`` is asked nothing either, and no probe ends that: what it promises in time does not come.
  4. A node that refused a loan is left out where others have pages, for `FIRST_BEHIND_S`, and twice as long after each
     further refusal behind that, at most `LAST_BEHIND_S`. A pull that lands ends it.

A node: silent <-> listening, and resting or not. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

PATIENCE_S = 0.5
"""What a request may wait for an answer."""

SILENCE_S = 2.0
"""Longer than a pull waits for its next byte."""

MOST_READ_S = 10.0
"""As long as the own store is waited for."""

FIRST_PROBE_S = 0.25
LAST_PROBE_S = 5.0

FIRST_BEHIND_S = 1.0
LAST_BEHIND_S = 60.0


@dataclass(frozen=True, slots=True)
class Best:
    """How a question ended: the node with the most pages, of equals the one with the fewest pulls under way, -1 when
    nobody has any. ``others`` have some, too, each so many, in the same order."""

    number: int
    node: int
    num_pages: int
    others: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Node:
    is_silent: bool = True
    probe_at_s: float = 0.0
    probe_after_s: float = FIRST_PROBE_S
    probe: int = 0
    probed_s: float = 0.0
    """When the last one was sent, of that number."""


@dataclass(slots=True)
class _Question:
    waits_for: set[int]
    began_s: float
    silent_at_s: float
    found: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each node with pages: how many, less its pulls under way, and which node."""


class Questions:
    """All questions of one rank to its ``num_nodes`` nodes."""

    def __init__(
        self, num_nodes: int, clock: Callable[[], float], rests: Callable[[int], bool] = lambda node: False
    ) -> None:
        self._clock = clock
        self._rests = rests
        self._nodes = [_Node() for _ in range(num_nodes)]
        self._questions: dict[int, _Question] = {}
        self._num_probes = 0
        self._behind: dict[int, tuple[float, float]] = {}
        """Of each node that refused: until when others are named, and for how long after the next refusal."""

    @property
    def listening(self) -> list[int]:
        return [number for number, node in enumerate(self._nodes) if not node.is_silent and not self._rests(number)]

    def begin(self, number: int, among: Collection[int]) -> list[int]:
        """Whom of ``among`` to ask; nobody: the question is not begun."""
        nodes = [node for node in self.listening if node in among]
        if nodes:
            now_s = self._clock()
            self._questions[number] = _Question(set(nodes), now_s, now_s + PATIENCE_S)
        return nodes

    def reads_on(self, number: int, node: int) -> None:
        """A node says that the answer is still under way."""
        question = self._questions.get(number)
        if question is not None and node in question.waits_for:
            question.silent_at_s = self._clock() + SILENCE_S

    def answered(self, number: int, node: int, num_pages: int, num_pulls: int = 0) -> Best | None:
        """A node, from which ``num_pulls`` are under way, says how many pages it has; the end of the question, if this
        was the last answer."""
        one = self._nodes[node]
        if number < 0 and number == one.probe and self._clock() <= one.probed_s + PATIENCE_S:
            self.heard(node)
        question = self._questions.get(number)
        if question is None or node not in question.waits_for:
            return None
        # That it has read for a while says nothing of how soon it answers.
        if self._clock() <= question.began_s + PATIENCE_S:
            self.heard(node)
        question.waits_for.discard(node)
        if num_pages:
            question.found.append((num_pages, -num_pulls, node))
        return None if question.waits_for else self._end(number)

    def missed(self, number: int, node: int) -> Best | None:
        """The question could not be put to a node; its end, if all others have answered."""
        self.silent(node)
        question = self._questions.get(number)
        if question is None:
            return None
        question.waits_for.discard(node)
        return None if question.waits_for else self._end(number)

    def heard(self, node: int) -> None:
        """It is there, and says so in time."""
        self._nodes[node] = _Node(is_silent=False)

    def connected(self, node: int) -> None:
        """Somebody at its address knows the secret: a silent node is asked at once whether it is there."""
        if self._nodes[node].is_silent:
            self._nodes[node] = _Node(probe_at_s=self._clock())

    def silent(self, node: int) -> None:
        """It did not answer in time."""
        one = self._nodes[node]
        if not one.is_silent:
            one.is_silent = True
            one.probe_at_s = self._clock() + one.probe_after_s

    def refused(self, node: int) -> None:
        """It said that it had pages, and then lent none."""
        now_s = self._clock()
        until_s, next_s = self._behind.get(node, (0.0, FIRST_BEHIND_S))
        # Pulls of one moment are refused for one reason.
        if until_s <= now_s:
            self._behind[node] = now_s + next_s, min(2 * next_s, LAST_BEHIND_S)

    def brought(self, node: int) -> None:
        """A pull from it has landed."""
        self._behind.pop(node, None)

    def expire(self) -> list[Best]:
        """End the questions whose time is over."""
        now_s = self._clock()
        late = []
        for number, question in self._questions.items():
            is_silent = question.silent_at_s <= now_s
            for node in question.waits_for if is_silent else ():
                self.silent(node)
            if is_silent or question.began_s + MOST_READ_S <= now_s:
                late.append(number)
        return [self._end(number) for number in late]

    def to_probe(self) -> list[tuple[int, int]]:
        """Silent nodes that are to be asked now whether they are there, each under a number below 0, as no question has
        it."""
        now_s = self._clock()
        due = [place for place, node in enumerate(self._nodes) if node.is_silent and node.probe_at_s <= now_s]
        for node in map(self._nodes.__getitem__, due):
            self._num_probes += 1
            node.probe, node.probed_s, node.probe_at_s = -self._num_probes, now_s, now_s + node.probe_after_s
            node.probe_after_s = min(2 * node.probe_after_s, LAST_PROBE_S)
        return [(place, self._nodes[place].probe) for place in due]

    def _end(self, number: int) -> Best:
        now_s = self._clock()
        found = sorted(self._questions.pop(number).found, reverse=True)
        have = [(node, num_pages) for num_pages, _, node in found]
        willing = [one for one in have if self._behind.get(one[0], (0.0, 0.0))[0] <= now_s]
        (node, num_pages), *others = willing or have or [(-1, 0)]
        return Best(number, node, num_pages, tuple(others))
