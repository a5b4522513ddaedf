# SPDX-License-Identifier: Apache-2.0
"""What sharing may cost a server under load: pure.

Batches form by chance, and a GPU rounds by the shape of a batch: two runs of one server differ in some tokens. So the
share of answers that sharing changes is held against the share that a second run without it changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_WAITED = 0.01
"""Of the time that a rank serves, what its allocations may wait."""

MORE_GAP, MORE_TAIL = 1.1, 1.5
"""How much longer the time between two tokens may be, by median and at the 99th percentile."""

TAIL_S = 0.005
"""And as much: the percentile of a fast decode is one scheduling step of another kind."""

NOISY_ANSWERS = 0.15
"""Of all answers, more may differ than between two runs without sharing: chance, with so few."""

TIMED = frozenset({"allocations_hardly_wait", "tokens_come_as_fast", "no_token_comes_much_later"})
"""Conditions that say nothing where kernels are interpreted."""


class Streamed(Protocol):
    """An answer: see ``engine.Answer``."""

    prompt: tuple[int, ...]
    tokens: list[int]
    gaps_s: tuple[float, ...]
    cached: dict[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """Conversations that were served at once; ``wait_us``: what the allocations of all ranks waited meanwhile."""

    answers: Sequence[Streamed]
    took_s: float
    wait_us: int
    num_ranks: int

    @property
    def wait_share(self) -> float:
        return self.wait_us / 1e6 / self.num_ranks / self.took_s

    @property
    def gap_s(self) -> float:
        """Between two tokens, by median."""
        return statistics.median(self._gaps_s())

    @property
    def tail_s(self) -> float:
        """The 99th percentile of it."""
        gaps_s = sorted(self._gaps_s())
        return gaps_s[min(len(gaps_s) - 1, round(0.99 * len(gaps_s)))]

    def _gaps_s(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps_s]

    def figures(self) -> dict[str, float]:
        return {
            "took_s": self.took_s,
            "itl_p50_s": self.gap_s,
            "itl_p99_s": self.tail_s,
            "alloc_wait_us": self.wait_us,
            "alloc_wait_share": self.wait_share,
            "from_elsewhere": sum(answer.cached.get(kind, 0) for answer in self.answers for kind in ("peer", "host")),
        }


def changed(reference: Run, run: Run) -> float:
    """The share of answers whose tokens are others, of those to the same prompt. An answer that differs makes another
    prompt of the next turn, which is then not compared."""
    expected = {answer.prompt: answer.tokens for answer in reference.answers}
    pairs = [(expected[answer.prompt], answer.tokens) for answer in run.answers if answer.prompt in expected]
    return sum(theirs != ours for theirs, ours in pairs) / max(len(pairs), 1)


def verdict(first: Run, second: Run, shared: Run, *, num_answers: int, num_tokens: int) -> dict[str, bool]:
    """``first`` and ``second`` are of a server that shares nothing."""
    figures = shared.figures()
    return {
        "every_turn_was_answered": all(
            len(run.answers) == num_answers and all(len(answer.tokens) == num_tokens for answer in run.answers)
            for run in (first, second, shared)
        ),
        "pages_came_from_elsewhere": figures["from_elsewhere"] > 0,
        "no_more_answers_change_than_between_two_runs_without_sharing": changed(first, shared)
        <= changed(first, second) + NOISY_ANSWERS,
        "allocations_hardly_wait": shared.wait_share <= MOST_WAITED,
        "tokens_come_as_fast": shared.gap_s <= MORE_GAP * second.gap_s,
        "no_token_comes_much_later": shared.tail_s <= MORE_TAIL * second.tail_s + TAIL_S,
    }
