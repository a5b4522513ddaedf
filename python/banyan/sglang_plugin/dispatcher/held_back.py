# SPDX-License-Identifier: Apache-2.0
"""Requests that the dispatcher holds back until a rank has computed what they begin with. Dispatcher process only.

Nothing is sent for them: the prompt that is waited for is another request's. ``banyan.routing.wait`` says when it pays.
A request is held (``held``) no longer than ``PATIENCE`` times what was expected, plus ``IDLE_S``; once what it waits
for is no longer to come, ``IDLE_S``. It is not held again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from banyan.routing import Wait
from banyan.routing.hint import Until
from banyan.sglang_plugin.dispatcher.detours import IDLE_S, PATIENCE
from banyan.sglang_plugin.dispatcher.held import Held, HeldRequests
from banyan.sglang_plugin.dispatcher.placement import FailureLog, Placer


@dataclass(slots=True, eq=False)
class _Waiting(Held):
    wait: Wait
    gone_since_s: float | None = None
    """Since when the rank has said that it has computed it, or has nothing to do."""


class HeldBack(HeldRequests[_Waiting]):
    """``send`` is called with a placed request."""

    def __init__(
        self, placer: Placer, send: Callable[[Any], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        failures = FailureLog("banyan: SGLang's own method dispatches a request that has waited")
        super().__init__(placer, send, clock, failures)

    def begin(self, req: Any, wait: Wait) -> None:
        """Hold the request."""
        self._held.append(_Waiting(req, self._clock(), wait))

    def _until(self, held: _Waiting, active: Collection[int]) -> Until | None:
        if held.wait.rank not in active:
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
        return Until.LATE if now_s >= held.since_s + PATIENCE * held.wait.expected_s + IDLE_S else None

    def _place(self, held: _Waiting, until: Until, active: Collection[int], held_us: int) -> None:
        self._placer.place_anew(held.req, active, held_us=held_us, held_until=until.value)
