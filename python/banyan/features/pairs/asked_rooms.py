# SPDX-License-Identifier: Apache-2.0
"""Rooms at a prefill server: those of its requests, and those that decode servers have asked for before that.

Anybody who may speak to the control port can ask for a room that no request will come to.

Invariants
  1. No more than ``max_rooms`` wait for their request, and none for longer than ``patience_s`` once others are asked
     for: the oldest are to be forgotten.
  2. A room is its request's from ``claim`` until ``release``, and is not forgotten meanwhile.

A room: asked for -> claimed -> released; or claimed -> asked for; or asked for -> forgotten. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MAX_ROOMS = 4096
PATIENCE_S = 300.0
"""As long as SGLang waits for the other half of a hand-over."""


class AskedRooms:
    """One rank's. ``asked`` says which rooms are to be forgotten."""

    def __init__(
        self, clock: Callable[[], float], *, max_rooms: int = MAX_ROOMS, patience_s: float = PATIENCE_S
    ) -> None:
        self._clock = clock
        self._max_rooms = max_rooms
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        self._claimed: set[int] = set()

    def __len__(self) -> int:
        """How many wait for their request."""
        return len(self._waiting)

    def asked(self, room: int) -> list[int]:
        """A decode server asks for it."""
        now_s = self._clock()
        with self._lock:
            if room not in self._claimed:
                self._waiting.setdefault(room, now_s)
            forgotten: list[int] = []
            for oldest, since_s in self._waiting.items():
                num_left = len(self._waiting) - len(forgotten)
                if num_left <= self._max_rooms and now_s - since_s <= self._patience_s:
                    break
                forgotten.append(oldest)
            for one in forgotten:
                del self._waiting[one]
        return forgotten

    def claim(self, room: int) -> None:
        """A request has come to it."""
        with self._lock:
            self._waiting.pop(room, None)
            self._claimed.add(room)

    def release(self, room: int) -> None:
        """The request is over, or has been given up. Twice is fine."""
        with self._lock:
            self._claimed.discard(room)

    def is_claimed(self, room: int) -> bool:
        return room in self._claimed
