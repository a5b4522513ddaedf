# SPDX-License-Identifier: Apache-2.0
"""Where pages come from that lie outside the ranks' pools and the arena: a store, a store that has to be asked, other
nodes.

A source brings pages into this rank's part of the arena; what is in the arena is anybody's, and the source is done with
it. All sources of a rank are asked in turn, the nearest first, each for what those before it do not have.

The contract of a source
  Ownership. It owns its questions, and what it opened for them. The frames of a read, and the read itself, are
  ``Prefetch``'s from the moment that they are claimed: a source starts reads there and never writes to the arena.
  Threads. All calls come from the scheduler thread, and none of them waits. What a source does on threads of its own is
  seen when ``poll`` looks.
  Failure. A source that has nothing, does not answer or is gone brings nothing: the prompt is then computed. It raises
  nothing for that. Pages that arrive damaged fail their read, which tells the requests that use them.

States of a source: open -> ``forget`` (any number of times) -> open -> ``close`` -> closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from banyan.core import Run

Worth = Callable[[int, Run], int]
"""Of the ``num_missing`` last pages of a prompt a source has ``found``, from the first on: how many to read."""


def all_that_is_found(num_missing: int, found: Run) -> int:
    return found.num_pages


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants: the pages ``keys``, to the end of its prompt. The node has the first ``num_held`` of them,
    or nearer sources know that they do; the first ``num_here`` lay on it when the request came. ``worth``: how many of
    those that a source finds are to be read."""

    request: str
    keys: Sequence[str]
    num_held: int
    worth: Worth
    num_here: int = 0

    @property
    def missing(self) -> Sequence[str]:
        return self.keys[self.num_held :]

    @property
    def behind(self) -> Sequence[str]:
        """The pages before those that are missing; they stay where they are."""
        return self.keys[: self.num_held]

    def after(self, num_held: int) -> Wanted:
        """What is left to want when so many are held."""
        return replace(self, num_held=num_held)


class Source:
    """One rank's, of one kind of page, for one namespace. What is not overridden is that of a source with nothing."""

    def ask(self, wanted: Wanted) -> int:
        """A request has come. Begin to read what this source is known to have of the missing pages, or ask it. How many
        leading pages of the prompt are held, or known to be here, then: at least ``wanted.num_held``."""
        return wanted.num_held

    def start_read(self, wanted: Wanted) -> None:
        """As ``ask``, a moment later: others have announced pages since. Nobody is asked again."""

    def is_awaited(self, request: str) -> bool:
        """Whether an answer for this request may still come. It ends by itself: no source is awaited for ever."""
        return False

    def poll(self) -> None:
        """Go on with what was answered, or has ended."""

    def forget(self) -> None:
        """Nobody wants any more what was asked for. Reads that have begun are ``Prefetch``'s to wait for."""

    def close(self) -> None:
        """Let go of what was opened for this namespace. No read of it is under way any more."""
