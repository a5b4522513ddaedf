# SPDX-License-Identifier: Apache-2.0
"""A store's troubles in the log: the first at once, then no more than one line a minute."""

from __future__ import annotations

import logging
import threading
from time import monotonic

logger = logging.getLogger("banyan")

SILENCE_S = 60.0


class RateLimitedLog:
    """Any thread."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._silent_until_s = float("-inf")
        self._num_unsaid = 0

    def about(self, trouble: object) -> None:
        with self._lock:
            now_s = monotonic()
            if now_s < self._silent_until_s:
                self._num_unsaid += 1
                return
            unsaid = f" ({self._num_unsaid} more like this since the last line)" if self._num_unsaid else ""
            self._silent_until_s, self._num_unsaid = now_s + SILENCE_S, 0
        logger.warning("banyan: store on %s: %s%s; such pages are computed", self._engine, trouble, unsaid)
