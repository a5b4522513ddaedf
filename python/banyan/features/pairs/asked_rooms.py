# SPDX-License-Identifier: Apache-2.0
"""Rooms at a prefill server: those of its requests, and those that decode servers have asked for before that.

Anybody who may speak to the control port can ask for a room that no request will come to. And SGLang does not clear the
room of a request that is aborted while it waits, or between two chunks.

Invariants
  1. No more than ``max_rooms`` wait for their request, nor more than were asked for by ``max_bytes``, and none for
     longer than ``patience_s`` once others are asked for: the oldest are to be forgotten. So are those that were left.
  2. A room is its request's from ``claim`` until ``release``, and is not forgotten meanwhile. Together those were asked
     for by ``max_claimed_bytes`` at most: who asks for more is to be passed over (``may_ask``).

A room: asked for -> claimed -> released, or left; or claimed -> asked for; or asked for, or left -> forgotten. Any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MAX_ROOMS = 4096
MAX_BYTES = 256 << 20
"""A prompt of a million tokens is asked for by 4 MB where a page is one token, else by a few hundred KB at most."""

MAX_CLAIMED_BYTES = 1 << 30

PATIENCE_S = 300.0
"""As long as SGLang waits for the other half of a hand-over."""


class AskedRooms:
    """One rank's. ``asked`` and ``left`` say which rooms are to be forgotten."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_rooms: int = MAX_ROOMS,
        max_bytes: int = MAX_BYTES,
        max_claimed_bytes: int = MAX_CLAIMED_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = _Rooms(max_rooms, max_bytes, patience_s)
        self._left = _Rooms(max_rooms, max_bytes, patience_s)
        self._max_claimed_bytes = max_claimed_bytes
        self._claimed: dict[int, int] = {}
        """By how many bytes each was asked for."""

    def may_ask(self, room: int, num_bytes: int) -> bool:
        """Whether so many bytes more have a place."""
        with self._lock:
            return room not in self._claimed or sum(self._claimed.values()) + num_bytes <= self._max_claimed_bytes

    def asked(self, room: int, num_bytes: int) -> list[int]:
        """A decode server's rank asks for it, by so many bytes."""
        now_s = self._clock()
        with self._lock:
            num_bytes += self._left.pop(room)
            if room in self._claimed:
                self._claimed[room] += num_bytes
            else:
                self._waiting.add(room, num_bytes, now_s)
            return [*self._waiting.take_old(now_s), *self._left.take_old(now_s)]

    def left(self, room: int) -> list[int]:
        """Its request was given up, and may not be heard of again."""
        now_s = self._clock()
        with self._lock:
            num_bytes = self._claimed.pop(room, 0) + self._left.pop(room)
            self._left.add(room, num_bytes, now_s)
            return self._left.take_old(now_s)

    def claim(self, room: int) -> None:
        """A request has come to it."""
        with self._lock:
            num_bytes = self._waiting.pop(room) + self._left.pop(room)
            self._claimed[room] = self._claimed.get(room, 0) + num_bytes

    def release(self, room: int) -> None:
        """The request is over, or has been given up. Twice is fine."""
        with self._lock:
            self._claimed.pop(room, None)

    def is_claimed(self, room: int) -> bool:
        return room in self._claimed


class _Rooms:
    """The oldest first."""

    def __init__(self, max_rooms: int, max_bytes: int, patience_s: float) -> None:
        self._max_rooms = max_rooms
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._num_bytes: dict[int, int] = {}
        self._total_bytes = 0
        self.since_s: dict[int, float] = {}

    def add(self, room: int, num_bytes: int, now_s: float) -> None:
        self.since_s.setdefault(room, now_s)
        self._num_bytes[room] = self._num_bytes.get(room, 0) + num_bytes
        self._total_bytes += num_bytes

    def pop(self, room: int) -> int:
        """By how many bytes it was asked for; 0 where it is none of these."""
        self.since_s.pop(room, None)
        num_bytes = self._num_bytes.pop(room, 0)
        self._total_bytes -= num_bytes
        return num_bytes

    def take_old(self, now_s: float) -> list[int]:
        """Those that are too many, too large together, or too old."""
        taken: list[int] = []
        while self.since_s:
            oldest, since_s = next(iter(self.since_s.items()))
            fits = len(self.since_s) <= self._max_rooms and self._total_bytes <= self._max_bytes
            if fits and now_s - since_s <= self._patience_s:
                break
            self.pop(oldest)
            taken.append(oldest)
        return taken
