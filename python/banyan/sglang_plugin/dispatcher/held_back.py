# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back until a rank has computed what they begin with.

Nothing is sent for them: the prompt that is waited for is another request's. ``banyan.routing.wait`` says when it pays.

Invariants
  1. A held request is sent on exactly once, whatever becomes of what it waits for, and whatever fails on the way.
  2. It is sent on before an abort that means it, so that its rank answers the abort.
  3. It is held no longer than ``PATIENCE`` times what was expected, or ``MOST_WAIT_S``, plus ``IDLE_S``; once what it
     waits for is no longer to come, ``IDLE_S``. It is not held again.
  4. No more than ``MAX_HELD`` are held: who comes then is placed at once.
  5. A round reads the loads once and looks at ``MAX_LOOKS`` requests, in turn: all requests go through this thread.
  6. After ``hold_no_more`` nothing is held.

States of a request: held -> sent on, ``Until`` says why. Dispatcher process only, one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from banyan import faults
from banyan.routing import NoActiveRank, Wait
from banyan.routing.hint import Until
from banyan.sglang_plugin.abort_ids import is_meant
from banyan.sglang_plugin.dispatcher.placement import Placer

PATIENCE = 2.0
MOST_WAIT_S = 60.0
"""What is expected goes by the mean rate of a rank's life: one that has become slow would be waited for without end."""

IDLE_S = 0.5
"""A rank may say that it has nothing to do some milliseconds before the pages of its last request are published."""

MAX_HELD = 256
MAX_LOOKS = 32
"""With 5 ms between two rounds each request is looked at every 40 ms at least."""


@dataclass(slots=True, eq=False)
class _Held:
    req: Any
    since_s: float
    wait: Wait
    gone_since_s: float | None = None
    """Since when the rank has said that it has computed it, or has nothing to do."""


class HeldBack:
    """What is held. ``send`` hands a placed request to SGLang."""

    def __init__(
        self, placer: Placer, send: Callable[[Any], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placer = placer
        self._send = send
        self._clock = clock
        self._held: deque[_Held] = deque()
        self._most = MAX_HELD

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        return len(self._held) < self._most

    def begin(self, req: Any, wait: Wait) -> None:
        """Hold the request."""
        self._held.append(_Held(req, self._clock(), wait))

    def send_on(self, active: Collection[int]) -> None:
        """Send on the requests whose wait is over, in the order in which they came."""
        if not self._held:
            return
        try:
            self._placer.read_loads()
        except BaseException as error:  # noqa: BLE001 - what was read last has to do: each wait has an end by itself
            faults.note("dispatcher.read_loads", error)
        for _ in range(min(MAX_LOOKS, len(self._held))):
            held = self._held.popleft()
            until = self._checked(held, active)
            if until is None:
                self._held.append(held)
            else:
                self._go_on(held, until, active)

    def hold_no_more(self, active: Collection[int]) -> None:
        """Nobody will call ``send_on`` again: send on all that is held, and have no room for more."""
        self._most = 0
        while self._held:
            held = self._held.popleft()
            try:
                self._go_on(held, Until.FAILED, active)
            except BaseException as error:  # noqa: BLE001 - the others are served
                faults.note("dispatcher.hold_no_more", error)

    def abort(self, message: Any, active: Collection[int]) -> None:
        """Send on what an abort means."""
        for held in list(self._held):
            if message.abort_all or is_meant(held.req.rid, message.rid):
                self._held.remove(held)
                self._go_on(held, Until.ABORTED, active)

    def _checked(self, held: _Held, active: Collection[int]) -> Until | None:
        try:
            return self._until(held, active)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the request is served
            faults.note("dispatcher.is_over", error)
            return Until.FAILED

    def _until(self, held: _Held, active: Collection[int]) -> Until | None:
        """Why its wait is over; None while it is not."""
        if held.wait.rank not in self._placer.heard(active):
            return Until.INACTIVE
        found = self._placer.look_up(held.req)
        if found.held_by(held.wait.rank) >= held.wait.num_tokens:
            return Until.LANDED
        now_s = self._clock()
        if self._placer.is_coming(held.req, found, held.wait):
            held.gone_since_s = None
        elif held.gone_since_s is None:
            held.gone_since_s = now_s
        elif now_s - held.gone_since_s >= IDLE_S:
            return Until.GIVEN_UP
        patience_s = min(PATIENCE * held.wait.expected_s, MOST_WAIT_S) + IDLE_S
        return Until.LATE if now_s >= held.since_s + patience_s else None

    def _go_on(self, held: _Held, until: Until, active: Collection[int]) -> None:
        """It is held no more: no failure below can send it twice."""
        try:
            held_us = int((self._clock() - held.since_s) * 1e6)
            self._placer.place_anew(held.req, active, held_us=held_us, held_until=until.value)
        except NoActiveRank:
            # SGLang's own method says so to the client.
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the request is served as in stock SGLang
            faults.note("dispatcher.place_held", error)
        # As SGLang does before it sends.
        held.req.wrap_pickle_fields()
        self._send(held.req)
