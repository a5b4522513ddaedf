# SPDX-License-Identifier: Apache-2.0
"""Rooms at a prefill server: those of its requests, and those that decode servers have asked for before that.

Anybody who may speak to the control port can ask for a room that no request will come to. And SGLang does not clear the
room of a request that is aborted while it waits, or between two chunks.

Invariants
  1. No more than ``max_rooms`` wait for their request, and none for longer than ``patience_s`` once others are asked
     for: the oldest are to be forgotten. So are those that were left.
  2. A room is its request's from ``claim`` until ``release``, and is not forgotten meanwhile.

A room: asked for -> claimed -> released, or left; or claimed -> asked for; or asked for, or left -> forgotten. Any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MAX_ROOMS = 4096
PATIENCE_S = 300.0
"""As long as SGLang waits for the other half of a hand-over."""


class AskedRooms:
    """One rank's. ``asked`` and ``left`` say which rooms are to be forgotten."""

    def __init__(
        self, clock: Callable[[], float], *, max_rooms: int = MAX_ROOMS, patience_s: float = PATIENCE_S
    ) -> None:
        self._clock = clock
        self._max_rooms = max_rooms
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._claimed: set[int] = set()

    def __len__(self) -> int:
        """How many wait for their request."""
        return len(self._waiting)

    def asked(self, room: int) -> list[int]:
        """A decode server asks for it."""
        now_s = self._clock()
        with self._lock:
            self._left.pop(room, None)
            if room not in self._claimed:
                self._waiting.setdefault(room, now_s)
            return self._take_old(self._waiting, now_s)

    def left(self, room: int) -> list[int]:
        """Its request was given up, and may not be heard of again."""
        now_s = self._clock()
        with self._lock:
            self._claimed.discard(room)
            self._left.pop(room, None)
            self._left[room] = now_s
            return self._take_old(self._left, now_s)

    def _take_old(self, rooms: dict[int, float], now_s: float) -> list[int]:
        """Those that are too many, or too old, the oldest first."""
        taken: list[int] = []
        for oldest, since_s in rooms.items():
            if len(rooms) - len(taken) <= self._max_rooms and now_s - since_s <= self._patience_s:
                break
            taken.append(oldest)
        for one in taken:
            del rooms[one]
        return taken

    def claim(self, room: int) -> None:
        """A request has come to it."""
        with self._lock:
            self._waiting.pop(room, None)
            self._left.pop(room, None)
            self._claimed.add(room)

    def release(self, room: int) -> None:
        """The request is over, or has been given up. Twice is fine."""
        with self._lock:
            self._claimed.discard(room)

    def is_claimed(self, room: int) -> bool:
        return room in self._claimed
