# SPDX-License-Identifier: Apache-2.0
"""Whether a server can be sent requests.

Invariants
  1. A server is up only after it was asked everything (``came_up``), and until one kind of probe has failed
     ``failures_to_down`` times in a row, or nobody listens at its address.
  2. Silence, and refusal or a word that it ends, are different. A server that refuses connections, or says that it
     ends, has ended, or still answers what it had begun: its connections say so themselves. One that is silent leaves
     them hanging.

States: *starting*, *up*, *down*, and up again.
"""

from __future__ import annotations

import time
from collections import Counter
from enum import StrEnum

ENDING_S = 5.0
"""A process that is killed stops listening and breaks its connections at once, and a second may pass before somebody
asks."""


class State(StrEnum):
    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class Probe(StrEnum):
    """What a server is asked, each kind with its own patience."""

    LOAD = "load"
    ENGINE = "engine"


class Health:
    """The state of one server, told by probes and by requests that could not be delivered."""

    def __init__(self, failures_to_down: int) -> None:
        self.state = State.STARTING
        self.last_error = "not asked yet"
        self._failures_to_down = failures_to_down
        self._refused_s: float | None = None
        self._says_it_ends = False
        self._num_failures: Counter[Probe] = Counter()

    def came_up(self) -> None:
        """Everything was asked and answered well."""
        self._num_failures.clear()
        self.last_error = ""
        self._refused_s = None
        self._says_it_ends = False
        self.state = State.UP

    def passed(self, probe: Probe) -> None:
        self._num_failures[probe] = 0

    def failed(self, probe: Probe, error: str) -> bool:
        """No good answer; whether what is in flight there must be given up."""
        self.last_error = error
        self._num_failures[probe] += 1
        if self._num_failures[probe] < self._failures_to_down:
            return False
        self._go_down()
        return True

    def refused(self, error: str) -> None:
        """Nobody listens at its address."""
        self.last_error = error
        if self._refused_s is None:
            self._refused_s = time.monotonic()
        self._go_down()

    def ends(self, error: str) -> None:
        """It says that it takes nothing new: it was told to end, or has just begun. It may have been told because its
        engine did not answer: then something may be to blame."""
        self.last_error = error
        self._says_it_ends = self._says_it_ends or self._num_failures[Probe.ENGINE] == 0
        self._go_down()

    @property
    def is_ending(self) -> bool:
        """Whether it has said so, or has been refusing connections for a while: what is lost there now did not end
        it."""
        if self._says_it_ends:
            return True
        return self._refused_s is not None and time.monotonic() - self._refused_s >= ENDING_S

    def _go_down(self) -> None:
        if self.state is State.UP:
            self.state = State.DOWN
