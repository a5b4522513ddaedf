# SPDX-License-Identifier: Apache-2.0
"""What has been asked and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_LISTED = 50


@dataclass
class Tally:
    """Counts, and the first MAX_LISTED complaints of each sort in words."""

    answers: Counter[str] = field(default_factory=Counter)
    """By kind of request and outcome."""

    disturbances: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    num_differing: int = 0
    num_errors: int = 0
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def answered(self, kind: str, outcome: str) -> None:
        self.answers[f"{kind}: {outcome}"] += 1

    def compared(self, kind: str, complaint: str, at_s: float) -> None:
        """An answer that was compared; `complaint` is empty where it was right."""
        self.num_compared += 1
        if complaint:
            self.num_differing += 1
            _list(self.differing, f"{at_s:.1f} s, {kind}: {complaint}")

    def failed(self, kind: str, reason: str, at_s: float) -> None:
        """An answer that a server without Banyan would not have given."""
        self.num_errors += 1
        _list(self.errors, f"{at_s:.1f} s, {kind}: {reason}")

    @property
    def num_requests(self) -> int:
        return sum(self.answers.values())

    def told(self) -> dict[str, Any]:
        """For the report."""
        return {
            "num_requests": self.num_requests,
            "num_compared": self.num_compared,
            "num_differing": self.num_differing,
            "num_errors": self.num_errors,
            "answers": dict(sorted(self.answers.items())),
            "disturbances": dict(sorted(self.disturbances.items())),
            "differing": self.differing,
            "errors": self.errors,
        }


def _list(listed: list[str], line: str) -> None:
    if len(listed) < MAX_LISTED:
        listed.append(line[:600])
