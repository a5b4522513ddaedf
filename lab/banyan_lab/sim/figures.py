# SPDX-License-Identifier: Apache-2.0
"""A published figure beside the simulated one. Every row says where the published one is from, and whether it lands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DUALPATH = "DualPath, arXiv 2602.21548"
TUTTI = "Tutti, arXiv 2605.03375"
ELASTIC = "Elastic P2P vs PD-Combined, 2026-05"
DYNAMO = "Dynamo, disaggregated communication guide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row.

    Attributes:
        published: None where nobody published one.
        within: the largest distance from the published figure that still counts as landing, in ``unit``; None where
            nothing is compared.
        note: what the figure hinges on, or why it does not land.
    """

    name: str
    published: float | None
    simulated: float
    unit: str
    source: str
    within: float | None = None
    note: str = ""

    @property
    def lands(self) -> bool | None:
        if self.published is None or self.within is None:
            return None
        return abs(self.simulated - self.published) <= self.within

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "lands": self.lands, "kind": "simulated"}


def relative(published: float, share: float) -> float:
    """The distance that is ``share`` of the published figure."""
    return abs(published) * share
