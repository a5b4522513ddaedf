# SPDX-License-Identifier: Apache-2.0
"""Who comes to a sealed socket without the secret: how he is told from others, and what is said of him."""

from __future__ import annotations

import logging
import time

import zmq

logger = logging.getLogger("banyan")

HANDSHAKE_MS = 5000
"""Who has not shown by then that he knows the secret is cut off."""

HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Known:
    """Says to ZeroMQ whose key may come in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Strangers:
    """Says that a handshake failed: once, and again when others have come for an hour."""

    QUIET_S = 3600.0

    def __init__(self, line: str) -> None:
        self._line = line
        self._said_s: float | None = None

    def came(self) -> None:
        now_s = time.monotonic()
        if self._said_s is None or now_s - self._said_s > self.QUIET_S:
            self._said_s = now_s
            logger.warning("banyan: %s", self._line)
