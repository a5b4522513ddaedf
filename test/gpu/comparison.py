# SPDX-License-Identifier: Apache-2.0
"""Whether answers are those of a reference: like with like, pure.

A GPU picks kernels by shape, so the same prompt behind a cached prefix of another length gives other bits, and now and
then another greedy token: with SGLang's own hits as well. Tokens are compared where prompt and cached prefix are the
same. How far a hit moves log-probabilities from those of an empty cache is measured beside it, for SGLang's own hits
and for ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Shaped(Protocol):
    """An answer: see ``engine.Answer``."""

    prompt: tuple[int, ...]
    tokens: list[int]
    num_cached_tokens: int
    num_verified: int
    cached: dict[str, int]


ELSEWHERE = {"peer", "host", "storage"}
NOISY_DRAFTS = 1.1
"""A GPU rounds by shape, and a draft's choice now and then with it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``num_other``: answers for which the reference has none of the same shape."""

    num_equal: int
    num_different: int
    num_other: int

    @property
    def share_compared(self) -> float:
        num_compared = self.num_equal + self.num_different
        return num_compared / max(num_compared + self.num_other, 1)


def compare(reference: Iterable[Shaped], answers: Iterable[Shaped]) -> Comparison:
    """Answers against those of the reference that had the same prompt and the same cached prefix."""
    expected = {(answer.prompt, answer.num_cached_tokens): answer.tokens for answer in reference}
    outcomes = [
        None if (tokens := expected.get((answer.prompt, answer.num_cached_tokens))) is None else tokens == answer.tokens
        for answer in answers
    ]
    return Comparison(outcomes.count(True), outcomes.count(False), outcomes.count(None))


def more_verified(reference: Iterable[Shaped], answers: Iterable[Shaped]) -> float:
    """How many forwards verified drafts for answers that came from elsewhere, of those that did for the same answers in
    the reference; 1.0 where nothing was drafted. Above 1, fewer drafts were accepted."""
    expected = {(answer.prompt, answer.num_cached_tokens): answer.num_verified for answer in reference}
    pairs = [
        (expected[key], answer.num_verified)
        for answer in answers
        if (key := (answer.prompt, answer.num_cached_tokens)) in expected and answer.cached.keys() & ELSEWHERE
    ]
    theirs, ours = sum(there for there, _ in pairs), sum(here for _, here in pairs)
    return ours / theirs if theirs else 1.0


def divergence(reference: Sequence[float], scored: Sequence[float]) -> float:
    """Mean estimate of the KL divergence, in nats for each token, from log-probabilities of the same tokens: never
    negative, zero where they are the same.

    Raises:
        ValueError: when there are none, or not as many of the one as of the other.
    """
    if not reference or len(reference) != len(scored):
        raise ValueError(f"{len(reference)} log-probabilities against {len(scored)}")
    ratios = [there - here for here, there in zip(reference, scored, strict=True)]
    return sum(math.expm1(ratio) - ratio for ratio in ratios) / len(ratios)


def is_near(ours: float, stocks: float) -> bool:
    """Whether a hit of ours is as near to an empty cache as one of SGLang's own, up to noise."""
    return ours <= max(2 * stocks, NOISE)


NOISE = 1e-5
"""Nats for each token: far below what changes a token."""
