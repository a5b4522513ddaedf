# SPDX-License-Identifier: Apache-2.0
"""The queue in front of the servers: first come, first served, bounded in length and in time.

Invariants
  1. A place is taken in the same step in which a waiting request is told: nobody can take it in between.
  2. Nobody overtakes: while someone waits, a new request waits behind. But who waits for one server holds up those
     alone who wait for the same one.
  3. A place that nobody is there to use any more is given back.
  4. A fault while a place is taken is that of the request that was to have it, whoever has woken the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

WINDOW_S = 10.0


class QueueFull(Exception):
    """Too many are waiting already."""


class WaitedTooLong(Exception):
    """No server had room in time."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    take: Callable[[], T | None]
    place: asyncio.Future[T]
    server: str | None


class Admission(Generic[T]):
    """Gives out places. ``T`` is whatever ``take`` gives: the place, already counted, or None when there is none."""

    def __init__(self, max_waiting: int, give_back: Callable[[T], None]) -> None:
        self._max_waiting = max_waiting
        self._give_back = give_back
        self._waiting: deque[_Waiting[T]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more would be refused, unless there is a place for it now."""
        return len(self._waiting) >= self._max_waiting > 0

    async def enter(self, take: Callable[[], T | None], timeout_s: float, server: str | None = None) -> T:
        """A place, at once or after waiting. ``server``: the one that it has to be at, if that can be.

        Raises:
            QueueFull: at once.
            WaitedTooLong: after ``timeout_s``.
        """
        if not any(one.server in (None, server) for one in self._waiting) and (place := take()) is not None:
            return place
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        waiting = _Waiting(take, asyncio.get_running_loop().create_future(), server)
        self._waiting.append(waiting)
        try:
            await asyncio.wait((waiting.place,), timeout=timeout_s)
            if waiting.place.done():
                return waiting.place.result()
            raise WaitedTooLong
        except BaseException:
            self._leave(waiting)
            if waiting.place.done() and waiting.place.exception() is None:
                # The client went away in the step in which its turn came.
                self._give_back(waiting.place.result())
            raise

    def wake(self) -> None:
        """Something has changed: give places to those in front, as long as there are any."""
        full: set[str] = set()
        for waiting in list(self._waiting):
            if waiting.server in full:
                continue
            try:
                place = waiting.take()
            except Exception as fault:  # noqa: BLE001 - raised where it is waited for
                self._waiting.remove(waiting)
                waiting.place.set_exception(fault)
                continue
            if place is not None:
                self._waiting.remove(waiting)
                waiting.place.set_result(place)
            elif waiting.server is None:
                return
            else:
                full.add(waiting.server)

    def _leave(self, waiting: _Waiting[T]) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            # It may have held up others, whose servers have room.
            self.wake()


class Rate:
    """Events per second, lately: those of the last ``WINDOW_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=4096)

    def happened(self) -> None:
        self._times_s.append(self._clock())

    def per_s(self) -> float:
        oldest_s = self._clock() - WINDOW_S
        while self._times_s and self._times_s[0] < oldest_s:
            self._times_s.popleft()
        return len(self._times_s) / WINDOW_S
