# SPDX-License-Identifier: Apache-2.0
"""Prompts that came a moment ago: what another server has written for them may be announced a moment later.

A next turn often follows its answer closely. A prompt that is looked up just before the answer's pages are announced is
looked up again when they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PATIENCE_S = 1.0
MAX_PROMPTS = 64

LookUp = Callable[[], None]
"""Looks a prompt up."""


class Arrivals:
    """The latest ``MAX_PROMPTS`` prompts, each for ``PATIENCE_S``. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._came: deque[tuple[float, LookUp]] = deque(maxlen=MAX_PROMPTS)
        self._version: int | None = None

    def came(self, look_again: LookUp) -> None:
        self._came.append((self._clock() + PATIENCE_S, look_again))

    def to_look_up(self, version: int) -> list[LookUp]:
        """All of them when the store's ``version`` is another one than the last time, none otherwise."""
        if version == self._version:
            return []
        self._version = version
        now_s = self._clock()
        while self._came and self._came[0][0] < now_s:
            self._came.popleft()
        return [look_again for _, look_again in self._came]

    def clear(self) -> None:
        """Forget all of them."""
        self._came.clear()
