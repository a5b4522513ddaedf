# SPDX-License-Identifier: Apache-2.0
"""Who has a part in the requests of a rank beside it: what of their pages is this rank's to read, to keep and to write.

A rank that serves by itself reads ahead what its store has, keeps what it has computed, and writes it: ``Partner`` as
it stands here. A feature may put another one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from banyan.arena.store_tier import StoreTier
from banyan.telemetry import Counters


class Partner:
    """Nobody has. One thread."""

    @property
    def reads_ahead(self) -> bool:
        """Whether a request's arrival makes this rank read what only others hold."""
        return True

    @property
    def uses_arena(self) -> bool:
        """Whether the pages of prompts in the arena are wanted again when they are asked for."""
        return True

    @property
    def orphaned(self) -> Callable[[Sequence[str]], None] | None:
        """Takes chains that the store has refused for want of the page before them, where somebody else may write that
        one; None: nobody does."""
        return None

    def came(self, keys: Sequence[str], look_again: Callable[[], None]) -> None:
        """A request for the prompt of ``keys`` has come; ``look_again`` reads what was announced since."""

    def to_keep(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain of pages that is complete goes to this rank's arena."""
        return keys

    def to_write(self, keys: Sequence[str]) -> Sequence[str]:
        """What of a chain that has come to the arena is this rank's to write."""
        return keys

    def meet(self, store: StoreTier, counters: Counters) -> None:
        """Offer again what came before its prompt, and look again for prompts that came before their pages."""

    def forget(self) -> None:
        """The pages of before are gone."""
