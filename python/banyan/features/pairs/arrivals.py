# SPDX-License-Identifier: Apache-2.0
"""Prompts that came a moment ago: what another server has written for them may be announced a moment later.

A next turn often follows its answer closely. A prompt that is looked up just before the answer's pages are announced is
looked up again when they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE_S = 1.0
MAX_PROMPTS = 64


class Arrivals(Generic[T]):
    """The latest ``MAX_PROMPTS`` prompts, each for ``PATIENCE_S``, with what is known of them. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._came: deque[tuple[float, Sequence[str], T]] = deque(maxlen=MAX_PROMPTS)
        self._version: int | None = None

    def came(self, keys: Sequence[str], known: T) -> None:
        self._came.append((self._clock() + PATIENCE_S, keys, known))

    def to_look_up(self, version: int) -> list[tuple[Sequence[str], T]]:
        """All of them when the store's ``version`` is another one than the last time, none otherwise."""
        if version == self._version:
            return []
        self._version = version
        now_s = self._clock()
        while self._came and self._came[0][0] < now_s:
            self._came.popleft()
        return [(keys, known) for _, keys, known in self._came]

    def clear(self) -> None:
        """Forget all of them."""
        self._came.clear()
