# SPDX-License-Identifier: Apache-2.0
"""What a server of a pair remembers because another one writes the other part of its conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from banyan.arena.partner import Partner
from banyan.arena.store_tier import StoreTier
from banyan.features.pairs.answer_pages import Answers
from banyan.features.pairs.arrivals import Arrivals
from banyan.features.pairs.orphans import Orphans
from banyan.features.pairs.roles import Role
from banyan.telemetry import Counters


class Others(Partner):
    """One rank's memory of them. ``takes_back``: whether it has a use for pages of prompts in its arena, though another
    one writes them. One thread."""

    def __init__(self, role: Role, clock: Callable[[], float], *, takes_back: bool = False) -> None:
        self.role = role
        self.takes_back = takes_back
        self.orphans = Orphans(clock)
        self.arrivals = Arrivals(clock)
        self._answers = Answers()

    @property
    def reads_ahead(self) -> bool:
        return self.role.reads_ahead

    @property
    def uses_arena(self) -> bool:
        return self.role.reads_ahead or self.takes_back

    @property
    def orphaned(self) -> Callable[[Sequence[str]], None]:
        return self.orphans.refused

    def came(self, keys: Sequence[str], look_again: Callable[[], None]) -> None:
        if self.role.keeps_answers_only:
            self._answers.handed(keys)
        if self.role.learns_from_others:
            self.arrivals.came(look_again)

    def to_keep(self, keys: Sequence[str]) -> Sequence[str]:
        if not self.role.keeps_answers_only:
            return keys
        answer = self._answers.behind(keys)
        if not self.takes_back:
            return answer
        self._answers.generated(answer)
        return keys

    def to_write(self, keys: Sequence[str]) -> Sequence[str]:
        return self._answers.take_generated(keys) if self.takes_back else keys

    def meet(self, store: StoreTier, counters: Counters) -> None:
        self.orphans.offer_again(store.offer_again)
        counters.archive_refused_pages += self.orphans.take_given_up()
        if self.role.learns_from_others:
            for look_again in self.arrivals.to_look_up(store.take_news()):
                look_again()

    def forget(self) -> None:
        self._answers.clear()
        self.orphans.clear()
        # What looks again belongs to a tier that may go: nothing of it stays, its views of the peers least.
        self.arrivals.clear()
