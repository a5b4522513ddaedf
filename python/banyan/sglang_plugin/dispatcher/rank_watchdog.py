# SPDX-License-Identifier: Apache-2.0
"""Ranks that stand still: whose process is there, and which say nothing although they have requests.

Invariants
  1. Each is told once in the log when it falls silent, and once when it is heard again or taken out.
  2. ``tell`` hears each change. What follows from it is decided elsewhere: ``Placer`` places nothing at them.

States of a rank: heard -> silent -> heard. Dispatcher process only, one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set

logger = logging.getLogger("banyan")

LOOK_PERIOD_S = 1.0
SILENCE_S = 30.0
"""A rank reports after each prefill, after every fifteenth step of decoding and when a request comes. Steps of a GPU
take milliseconds; those of a CPU, and the first ones that compile something, may take longer."""


class RankWatchdog:
    """``unheard_s`` gives, at a time by the clock of the reports, how long each rank has not reported what it was sent;
    ``tell`` takes who is silent."""

    def __init__(self, unheard_s: Callable[[float], Mapping[int, float]], tell: Callable[[Set[int]], None]) -> None:
        self._unheard_s = unheard_s
        self._tell = tell
        self._silent: frozenset[int] = frozenset()
        self._next_look_s = 0.0

    def look(self, now_s: float) -> None:
        """See who is silent, if it is time to."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_PERIOD_S
        silent = frozenset(rank for rank, wait_s in self._unheard_s(now_s).items() if wait_s >= SILENCE_S)
        if silent == self._silent:
            return
        for rank in sorted(silent - self._silent):
            logger.warning(
                "banyan: rank %d has requests and has not reported for %d s: it is stopped, or in a long step; "
                "other requests go to the other ranks, as far as they may",
                rank,
                SILENCE_S,
            )
        for rank in sorted(self._silent - silent):
            logger.warning("banyan: rank %d reports again, or SGLang has taken it out", rank)
        self._silent = silent
        self._tell(silent)
