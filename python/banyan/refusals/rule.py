# SPDX-License-Identifier: Apache-2.0
"""A reason why sharing cannot start, as a row of a table: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Facts]):
    """``line`` names the flag and the way out."""

    applies: Callable[[Facts], bool]
    line: Callable[[Facts], str]


def lines_of(rules: Iterable[Rule[Facts]], facts: Facts) -> list[str]:
    """Of the rules that apply, in order."""
    return [rule.line(facts) for rule in rules if rule.applies(facts)]
