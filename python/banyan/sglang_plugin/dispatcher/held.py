# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back, whatever for: how many, how often they are looked at, how they go on.

Invariants
  1. A held request is sent on exactly once, whatever becomes of what it waits for, and whatever fails on the way.
  2. It is sent on before an abort that means it, so that its rank answers the abort.
  3. No more than ``MAX_HELD`` are held: who comes then is placed at once.
  4. A round reads the loads once and looks at ``MAX_LOOKS`` requests, in turn: all requests go through this thread.

States of a request: held -> sent on, ``Until`` says why. Dispatcher process only, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from banyan.routing.hint import Until
from banyan.sglang_plugin.dispatcher.placement import FailureLog, Placer

MAX_HELD = 256
MAX_LOOKS = 32
"""With 5 ms between two rounds each request is looked at every 40 ms at least."""


@dataclass(slots=True, eq=False)
class Held:
    req: Any
    since_s: float


T = TypeVar("T", bound=Held)


class HeldRequests(Generic[T]):
    """What is held. ``send`` hands a request to SGLang."""

    def __init__(
        self, placer: Placer, send: Callable[[Any], None], clock: Callable[[], float], failures: FailureLog
    ) -> None:
        self._placer = placer
        self._send = send
        self._clock = clock
        self._failures = failures
        self._held: deque[T] = deque()

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        return len(self._held) < MAX_HELD

    def send_on(self, active: Collection[int]) -> None:
        """Send on the requests whose wait is over, in the order in which they came."""
        if not self._held:
            return
        try:
            self._placer.read_loads()
        except Exception as error:  # noqa: BLE001 - what was read last has to do: each wait has an end by itself
            self._failures.note(error)
        for _ in range(min(MAX_LOOKS, len(self._held))):
            held = self._held.popleft()
            until = self._checked(held, active)
            if until is None:
                self._held.append(held)
            else:
                self._go_on(held, until, active)

    def abort(self, message: Any, active: Collection[int]) -> None:
        """Send on what an abort means, as SGLang matches it."""
        for held in list(self._held):
            if message.abort_all or held.req.rid.startswith(message.rid):
                self._held.remove(held)
                self._go_on(held, Until.ABORTED, active)

    def _checked(self, held: T, active: Collection[int]) -> Until | None:
        try:
            return self._until(held, active)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served
            self._failures.note(error)
            return Until.FAILED

    def _go_on(self, held: T, until: Until, active: Collection[int]) -> None:
        """It is held no more: no failure below can send it twice."""
        try:
            self._place(held, until, active, int((self._clock() - held.since_s) * 1e6))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served as in stock SGLang
            self._failures.note(error)
        # As SGLang does before it sends.
        held.req.wrap_pickle_fields()
        self._send(held.req)

    def _until(self, held: T, active: Collection[int]) -> Until | None:
        """Why its wait is over; None while it is not."""
        raise NotImplementedError

    def _place(self, held: T, until: Until, active: Collection[int], held_us: int) -> None:
        """Name its rank, and add the hint."""
        raise NotImplementedError
