# SPDX-License-Identifier: Apache-2.0
"""Servers that let a question wait. Who asks stands still meanwhile, and with it all streams of its rank: such a server
is not asked again for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from banyan.latest import Latest

T = TypeVar("T")

SLOW_S = 2.0
"""Who answers nothing keeps SGLang for 5 s, a host that is gone for 3. A server under load says that it has nothing
yet, which sounds the same, within less: it is asked again at once."""

TIMES_AS_LONG = 10
MAX_SERVERS = 1024


class Unanswered:
    """One rank's. Any thread; whoever asks at the same time waits, too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: Latest[str, float] = Latest(MAX_SERVERS)

    def ask(self, server: str, ask: Callable[[], T], nothing: T) -> T:
        """What ``ask`` says; ``nothing``, as it says without an answer, where the server was slow to bring none."""
        begun_s = self._clock()
        if begun_s < self._until_s.get(server, begun_s):
            return nothing
        said = ask()
        took_s = self._clock() - begun_s
        if said == nothing and took_s > SLOW_S:
            self._until_s.put(server, begun_s + (1 + TIMES_AS_LONG) * took_s)
        return said
