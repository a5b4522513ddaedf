# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back until a rank has computed what they begin with. Dispatcher process only.

Nothing is sent for them: the prompt that is waited for is another request's. ``banyan.routing.wait`` says when it pays.

Invariants
  1. A held request is sent on exactly once, whatever becomes of the other one.
  2. It is sent on before an abort that means it, so that its rank answers the abort.
  3. It is held no longer than ``PATIENCE`` times what was expected, plus ``IDLE_S``; once what it waits for is no
     longer to come, ``IDLE_S``. It is not held again.

States of a request: held -> sent on, ``Until`` says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from banyan.routing import Wait
from banyan.routing.hint import Until
from banyan.sglang_plugin.dispatcher.detours import IDLE_S, PATIENCE
from banyan.sglang_plugin.dispatcher.placement import FailureLog, Placer


@dataclass(slots=True)
class _Held:
    req: Any
    wait: Wait
    since_s: float
    gone_since_s: float | None = None
    """Since when the rank has said that it has computed it, or has nothing to do."""


class HeldBack:
    """What is held. Called by the dispatcher's only thread. ``send`` hands a placed request to SGLang."""

    def __init__(
        self, placer: Placer, send: Callable[[Any], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placer = placer
        self._send = send
        self._clock = clock
        self._failures = FailureLog("banyan: SGLang's own method dispatches a request that has waited")
        self._held: list[_Held] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    def begin(self, req: Any, wait: Wait) -> None:
        """Hold the request."""
        self._held.append(_Held(req, wait, self._clock()))

    def send_on(self, active: Collection[int]) -> None:
        """Place every held request whose wait is over, in the order in which they came."""
        for held in list(self._held):
            until = self._until(held, active)
            if until is not None:
                self._release(held, until, active)

    def abort(self, message: Any, active: Collection[int]) -> None:
        """Send on what an abort means, as SGLang matches it."""
        for held in list(self._held):
            if message.abort_all or held.req.rid.startswith(message.rid):
                self._release(held, Until.ABORTED, active)

    def _until(self, held: _Held, active: Collection[int]) -> Until | None:
        if held.wait.rank not in active:
            return Until.INACTIVE
        if self._placer.has_come(held.req, held.wait):
            return Until.LANDED
        now_s = self._clock()
        if self._placer.is_coming(held.req, held.wait):
            held.gone_since_s = None
        elif held.gone_since_s is None:
            held.gone_since_s = now_s
        elif now_s - held.gone_since_s >= IDLE_S:
            return Until.GIVEN_UP
        return Until.LATE if now_s >= held.since_s + PATIENCE * held.wait.expected_s + IDLE_S else None

    def _release(self, held: _Held, until: Until, active: Collection[int]) -> None:
        # First of all, so that no failure below can send it twice.
        self._held.remove(held)
        held_us = int((self._clock() - held.since_s) * 1e6)
        try:
            self._placer.place_anew(held.req, active, held_us=held_us, held_until=until.value)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request is served as in stock SGLang
            self._failures.note(error)
        # As SGLang does before it sends.
        held.req.wrap_pickle_fields()
        self._send(held.req)
