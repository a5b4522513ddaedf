# SPDX-License-Identifier: Apache-2.0
"""How long a prefill forward takes: a sum of five terms with non-negative weights, fitted to measured forwards.

For a batch of pieces, each of ``extend`` new tokens behind a prefix of ``prefix`` tokens:

    fixed + token * extend + pair * extend * (prefix + extend / 2) + context * (prefix + extend)
          + masked * extend * extend / 2 where there is a prefix

The weights of a model are read once (fixed), matrix products are linear in new tokens (token), attention in query-key
pairs (pair), and gathering the keys in the context (context). Some kernels skip the future only where no prefix lies
before it, and else compute the half square that the mask then hides (masked). "DualPath" (scheduling within an engine)
predicts the attention only, because expert parallelism balances the rest; running decodes wait for the whole forward,
and so it is the whole forward that is predicted here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

Piece = tuple[int, int]
"""``(extend_tokens, prefix_tokens)``: what one request computes in one forward, and what lies before it."""

NUM_TERMS = 5

NOTHING = 1e-9
"""Squared relative error below which two fits are equally good."""


@dataclass(frozen=True, slots=True)
class ForwardSample:
    """One measured forward, waits for data not counted."""

    pieces: tuple[Piece, ...]
    forward_us: float

    @property
    def extend_tokens(self) -> int:
        return sum(extend for extend, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The fitted weights, in microseconds."""

    fixed_us: float
    token_us: float
    pair_us: float
    context_us: float
    masked_us: float = 0.0

    def __post_init__(self) -> None:
        if min(self._weights) < 0 or max(self._weights) <= 0:
            raise ValueError(f"weights {self._weights}: none below zero, one above")

    @property
    def _weights(self) -> tuple[float, ...]:
        return self.fixed_us, self.token_us, self.pair_us, self.context_us, self.masked_us

    def time_us(self, pieces: Iterable[Piece]) -> float:
        """Time of a forward over these pieces; zero when there are none."""
        total_us = 0.0
        for extend_tokens, prefix_tokens in pieces:
            if extend_tokens > 0:
                # The first piece that computes anything starts the forward.
                total_us = (total_us or self.fixed_us) + self.piece_us(extend_tokens, prefix_tokens)
        return total_us

    def piece_us(self, extend_tokens: int, prefix_tokens: int) -> float:
        """What one more piece adds to a forward. Rises with both lengths."""
        if extend_tokens == 0:
            return 0.0
        num_masked = extend_tokens * extend_tokens / 2 if prefix_tokens else 0.0
        num_pairs = extend_tokens * (prefix_tokens + extend_tokens / 2)
        return (
            self.token_us * extend_tokens
            + self.pair_us * num_pairs
            + self.context_us * (prefix_tokens + extend_tokens)
            + self.masked_us * num_masked
        )

    @classmethod
    def fit(cls, samples: Sequence[ForwardSample]) -> PrefillCost:
        """The weights with the smallest squared relative error: a short forward counts as much as a long one.

        Every subset of the terms is solved for and the best without a negative weight taken, which is exact and, for
        five terms, cheap. Terms that the samples cannot tell apart are left out.

        Raises:
            ValueError: without samples, or with one that took no time.
        """
        if not samples or min(sample.forward_us for sample in samples) <= 0:
            raise ValueError("a fit needs forwards that took time")
        rows = [[term / sample.forward_us for term in _terms(sample.pieces)] for sample in samples]
        # Columns of equal size, so that the pivots of every subset can be judged alike.
        sizes = [max(abs(row[term]) for row in rows) or 1.0 for term in range(NUM_TERMS)]
        columns = [[row[term] / size for row in rows] for term, size in enumerate(sizes)]
        products = [[sum(map(operator.mul, left, right)) for right in columns] for left in columns]
        sums = [sum(column) for column in columns]
        best_error, best = float("inf"), [0.0] * NUM_TERMS
        for num_chosen in range(1, NUM_TERMS + 1):
            for chosen in combinations(range(NUM_TERMS), num_chosen):
                weights = _solve([[products[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen])
                if weights is None or min(weights) < 0:
                    continue
                error = len(rows) - sum(map(operator.mul, weights, (sums[i] for i in chosen)))
                # More terms must explain more: where samples are few, several fit them all.
                if error < best_error - NOTHING * len(rows):
                    best_error, best = error, [0.0] * NUM_TERMS
                    for weight, term in zip(weights, chosen, strict=True):
                        best[term] = weight / sizes[term]
        return cls(*best)


def _terms(pieces: Sequence[Piece]) -> list[float]:
    """The factors of the five weights, in the order of the fields."""
    return [
        1.0,
        float(sum(extend for extend, _ in pieces)),
        sum(extend * (prefix + extend / 2) for extend, prefix in pieces),
        float(sum(extend + prefix for extend, prefix in pieces)),
        sum(extend * extend / 2 for extend, prefix in pieces if prefix),
    ]


def _solve(matrix: list[list[float]], right_side: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None when the matrix is singular to working precision."""
    rows = [[*row, value] for row, value in zip(matrix, right_side, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-10 * len(rows):
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [value - factor * other for value, other in zip(rows[row], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
