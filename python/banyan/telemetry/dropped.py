# SPDX-License-Identifier: Apache-2.0
"""The last leaves that left a rank's tree, and why it was these: for people."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from banyan.core import SourceKind

MAX_REMEMBERED = 64


class Dropped:
    """One rank's. ``clock``: seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: deque[tuple[float, str, int, SourceKind | None, bool]] = deque(maxlen=MAX_REMEMBERED)

    def went(self, key: str, num_pages: int, copy: SourceKind | None, *, is_again: bool) -> None:
        """A leaf of ``num_pages`` that ends with ``key`` has gone; ``copy``: where else that page lay then.

        ``is_again``: whether prompts had asked for it more than once.
        """
        self._last.append((self._clock(), key, num_pages, copy, is_again))

    def state(self) -> list[dict[str, Any]]:
        """What ``banyan explain dropped`` reads, the latest first."""
        now_s = self._clock()
        return [
            {
                "key": key,
                "num_pages": num_pages,
                "ago_s": round(now_s - at_s, 1),
                "copy": None if copy is None else copy.value,
                "again": is_again,
            }
            for at_s, key, num_pages, copy, is_again in reversed(self._last)
        ]
