# SPDX-License-Identifier: Apache-2.0
"""Seeded tie-breaks: where two ranks are equally good, neither the lower number nor the earlier place may decide.

Always giving ties to rank 0 would send every request of an idle server there.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """Finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class SeededTieBreaks:
    """Tie-breaks that depend on the seed, the turn and the rank, and on nothing else."""

    seed: int = 0

    def __call__(self, turn: int, rank: int) -> int:
        return _mix(_mix(_mix(self.seed & _MASK) + turn & _MASK) + rank + 1 & _MASK)
