# SPDX-License-Identifier: Apache-2.0
"""How long a prefill forward takes: a sum of four terms with non-negative weights, fitted to measured forwards.

For a batch of pieces, each of ``extend`` new tokens behind a prefix of ``prefix`` tokens:

    fixed + token * extend + pair * extend * (prefix + extend / 2) + context * (prefix + extend)

The weights of a model are read once (fixed), matrix products are linear in new tokens (token), attention in query-key
pairs (pair), and gathering the keys in the context (context). "DualPath" (scheduling within an engine) predicts the
attention only, because expert parallelism balances the rest; running decodes wait for the whole forward, and so it is
the whole forward that is predicted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

Piece = tuple[int, int]
"""``(extend_tokens, prefix_tokens)``: what one request computes in one forward, and what lies before it."""

NUM_TERMS = 4


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

    def __post_init__(self) -> None:
        if min(self._weights) < 0 or max(self._weights) <= 0:
            raise ValueError(f"weights {self._weights}: none below zero, one above")

    @property
    def _weights(self) -> tuple[float, float, float, float]:
        return self.fixed_us, self.token_us, self.pair_us, self.context_us

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
        num_pairs = extend_tokens * (prefix_tokens + extend_tokens / 2)
        return (
            self.token_us * extend_tokens + self.pair_us * num_pairs + self.context_us * (prefix_tokens + extend_tokens)
        )

    def largest_extend(self, prefix_tokens: int, budget_us: float, *, at_most: int) -> int:
        """The most new tokens behind ``prefix_tokens`` that add no more than ``budget_us``; 0 when one is too many."""
        low, high = 0, max(0, at_most)
        while low < high:
            middle = (low + high + 1) // 2
            if self.piece_us(middle, prefix_tokens) <= budget_us:
                low = middle
            else:
                high = middle - 1
        return low

    @classmethod
    def fit(cls, samples: Sequence[ForwardSample]) -> PrefillCost:
        """The weights with the smallest squared relative error: a short forward counts as much as a long one.

        Every subset of the terms is solved for and the best without a negative weight taken, which is exact and, for
        four terms, cheap. Terms that the samples cannot tell apart are left out.

        Raises:
            ValueError: without samples, or with one that took no time.
        """
        if not samples or min(sample.forward_us for sample in samples) <= 0:
            raise ValueError("a fit needs forwards that took time")
        rows = [_terms(sample.pieces) for sample in samples]
        scaled = [[value / sample.forward_us for value in row] for row, sample in zip(rows, samples, strict=True)]
        best: tuple[float, list[float]] | None = None
        for size in range(1, NUM_TERMS + 1):
            for chosen in combinations(range(NUM_TERMS), size):
                weights = _least_squares(scaled, chosen)
                if weights is None or min(weights) < 0:
                    continue
                error = sum(
                    (1 - sum(w * row[term] for w, term in zip(weights, chosen, strict=True))) ** 2 for row in scaled
                )
                if best is None or error < best[0] * (1 - 1e-9):
                    full = [0.0] * NUM_TERMS
                    for weight, term in zip(weights, chosen, strict=True):
                        full[term] = weight
                    best = error, full
        # The first term alone always has a solution: a positive constant.
        assert best is not None
        return cls(*best[1])


def mean_relative_error(cost: PrefillCost, samples: Sequence[ForwardSample]) -> float:
    """Mean of |predicted - measured| / measured.

    Raises:
        ValueError: without samples.
    """
    if not samples:
        raise ValueError("an error needs samples")
    return sum(abs(cost.time_us(s.pieces) - s.forward_us) / s.forward_us for s in samples) / len(samples)


def _terms(pieces: Sequence[Piece]) -> list[float]:
    """The factors of the four weights, in the order of the fields."""
    return [
        1.0,
        float(sum(extend for extend, _ in pieces)),
        sum(extend * (prefix + extend / 2) for extend, prefix in pieces),
        float(sum(extend + prefix for extend, prefix in pieces)),
    ]


def _least_squares(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Weights of the chosen columns for a right side of ones; None when the columns do not determine them."""
    scale = [max(abs(row[term]) for row in rows) for term in chosen]
    if min(scale) == 0:
        return None
    columns = [[row[term] / size for row in rows] for term, size in zip(chosen, scale, strict=True)]
    matrix = [[sum(a * b for a, b in zip(left, right, strict=True)) for right in columns] for left in columns]
    right_side = [sum(column) for column in columns]
    solved = _solve(matrix, right_side)
    return None if solved is None else [value / size for value, size in zip(solved, scale, strict=True)]


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
