# SPDX-License-Identifier: Apache-2.0
"""How long one layer of a forward pass takes, by the number of new tokens and the length of the prefix before them.

Measured once by ``banyan profile`` (``SlackTable.fit``), corrected while the server runs (``corrected_table``).

Invariants
  1. Both axes ascend strictly, and every measured time is positive.
  2. The table never falls along either axis: more new tokens or a longer prefix cannot take less time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """One forward pass as the table sees it: its new tokens, and the prefix that each of them has before it.

    ``prefix_tokens`` of a batch is the mean that leaves the number of (query, key) pairs unchanged, so that one
    table of single requests serves batches.
    """

    extend_tokens: int
    prefix_tokens: int

    @classmethod
    def of_batch(cls, requests: Iterable[tuple[int, int]]) -> ForwardShape:
        """The shape of a batch of ``(extend_tokens, prefix_tokens)`` requests; a decode step extends by 1 each."""
        extend_tokens = num_pairs = 0
        for extend, prefix in requests:
            extend_tokens += extend
            num_pairs += extend * prefix + extend * extend // 2
        if extend_tokens == 0:
            return cls(0, 0)
        return cls(extend_tokens, max(0, num_pairs // extend_tokens - extend_tokens // 2))


@dataclass(frozen=True, slots=True)
class SlackTable:
    """Per-layer times in microseconds: ``layer_us[e][p]`` for ``extend_tokens[e]`` new after ``prefix_tokens[p]``."""

    extend_tokens: tuple[int, ...]
    prefix_tokens: tuple[int, ...]
    layer_us: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.extend_tokens, self.prefix_tokens):
            if not axis or axis[0] < 0 or any(low >= high for low, high in pairwise(axis)):
                raise ValueError(f"axis {axis}: needs ascending numbers of tokens")
        if len(self.layer_us) != len(self.extend_tokens) or any(
            len(row) != len(self.prefix_tokens) for row in self.layer_us
        ):
            raise ValueError("layer_us: needs one row for each extend length and one column for each prefix length")
        if not all(value > 0 for row in self.layer_us for value in row):
            raise ValueError("layer_us: needs positive times")
        if not _is_monotone(self.layer_us):
            raise ValueError("layer_us: falls along an axis; SlackTable.fit smooths measured times")

    @classmethod
    def fit(
        cls, extend_tokens: Sequence[int], prefix_tokens: Sequence[int], measured_us: Sequence[Sequence[float]]
    ) -> SlackTable:
        """The monotone table nearest to noisy times: its largest change of any cell is as small as can be."""
        return cls(
            tuple(extend_tokens),
            tuple(prefix_tokens),
            tuple(tuple(row) for row in _nearest_monotone(measured_us)),
        )

    def time_us(self, shape: ForwardShape) -> float:
        """Time of one layer: bilinear between cells, the nearest edge below the axes.

        Longer prefixes than measured go on with the last slope, more new tokens than measured in proportion: rather too
        little than too much, because what is predicted here is given away to writes.
        """
        if shape.extend_tokens == 0:
            return 0.0
        row, share = _place(self.extend_tokens, shape.extend_tokens)
        low = self._row_us(row, shape.prefix_tokens)
        if share == 0.0:
            return low * max(1.0, shape.extend_tokens / max(1, self.extend_tokens[-1]))
        return low + (self._row_us(row + 1, shape.prefix_tokens) - low) * share

    def _row_us(self, row: int, prefix_tokens: int) -> float:
        column, share = _place(self.prefix_tokens, prefix_tokens)
        over = max(0, prefix_tokens - self.prefix_tokens[-1])
        if over == 0:
            line = self.layer_us[row]
            return line[column] if share == 0.0 else line[column] + (line[column + 1] - line[column]) * share
        # Measured slopes cross; the steepest of the shorter rows keeps the extension monotone.
        return max(_extended(self.prefix_tokens, line, over) for line in self.layer_us[: row + 1])


def _place(axis: tuple[int, ...], value: int) -> tuple[int, float]:
    """The cell at or below ``value``, and how far it is to the next; 0 outside of the axis."""
    if value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    left = bisect_right(axis, value) - 1
    return left, (value - axis[left]) / (axis[left + 1] - axis[left])


def _extended(axis: tuple[int, ...], line: tuple[float, ...], over: int) -> float:
    """The line, ``over`` tokens beyond its end."""
    if len(axis) == 1:
        return line[-1]
    return line[-1] + over * (line[-1] - line[-2]) / (axis[-1] - axis[-2])


def _is_monotone(rows: Sequence[Sequence[float]]) -> bool:
    along = all(left <= right for row in rows for left, right in pairwise(row))
    across = all(a <= b for low, high in pairwise(rows) for a, b in zip(low, high, strict=True))
    return along and across


def _nearest_monotone(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Midway between the largest value before a cell and the smallest behind it: the minimax isotonic regression."""
    risen = _running(rows, max)
    flipped = [list(reversed(row)) for row in reversed(rows)]
    fallen = [list(reversed(row)) for row in reversed(_running(flipped, min))]
    return [[(up + down) / 2 for up, down in zip(*pair, strict=True)] for pair in zip(risen, fallen, strict=True)]


def _running(rows: Sequence[Sequence[float]], pick: Callable[[Sequence[float]], float]) -> list[list[float]]:
    """Each cell: the extreme of all cells above and to the left of it, itself included."""
    done: list[list[float]] = []
    for row in rows:
        line: list[float] = []
        for column, value in enumerate(row):
            reach = [value]
            if line:
                reach.append(line[-1])
            if done:
                reach.append(done[-1][column])
            line.append(pick(reach))
        done.append(line)
    return done
