# SPDX-License-Identifier: Apache-2.0
"""Pauses of a scheduler that has nothing to compute while the other server of its pair is at work.

SGLang's loop goes round without a pause while any request waits for its hand-over. On a CPU that takes a core from the
forward that it waits for, and the interpreter from the threads that send. Pauses grow with the time that has been
waited for, so that what comes at once is seen at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.00005
LAST_PAUSE_S = 0.0005
"""What a hand-over that has ended may go unseen."""

GROWTH = 1.25


class Pauses:
    """One scheduler's. One thread."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._next_s = FIRST_PAUSE_S

    def between_steps(self, *, has_work: bool) -> None:
        """The scheduler has looked round; pause if there was nothing to compute."""
        if has_work:
            self._next_s = FIRST_PAUSE_S
            return
        self._sleep(self._next_s)
        self._next_s = min(GROWTH * self._next_s, LAST_PAUSE_S)
