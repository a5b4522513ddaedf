# SPDX-License-Identifier: Apache-2.0
"""What a server of a pair remembers because another one writes the other part of its conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from banyan.disagg.answer_pages import Answers
from banyan.disagg.arrivals import Arrivals
from banyan.disagg.orphans import Orphans
from banyan.disagg.roles import Role


class Others:
    """One rank's memory of them. ``takes_back``: whether it has a use for pages of prompts in its arena, though another
    one writes them. One thread."""

    def __init__(self, role: Role, clock: Callable[[], float], *, takes_back: bool = False) -> None:
        self.role = role
        self.takes_back = takes_back
        self.orphans = Orphans(clock)
        self.arrivals: Arrivals[Any] = Arrivals(clock)
        self._answers = Answers()

    def came(self, keys: Sequence[str], known: Any) -> None:
        """A request for the prompt of ``keys`` has come; ``known`` is given back when it is to be looked up again."""
        if self.role.keeps_answers_only:
            self._answers.handed(keys)
        if self.role.learns_from_others:
            self.arrivals.came(keys, known)

    def to_keep(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain of pages that is complete goes to this server's arena."""
        if not self.role.keeps_answers_only:
            return keys
        answer = self._answers.behind(keys)
        if not self.takes_back:
            return answer
        self._answers.generated(answer)
        return keys

    def to_write(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain that has come to the arena is this server's to write."""
        return self._answers.take_generated(keys) if self.takes_back else keys
