# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: read from clients, and kept until an answer begins, for another attempt. And those of
answers, until their clients have taken them.

Invariants
  1. All bodies of requests together, read in part or whole, have no more than ``max_bytes`` in memory.
  2. No whole answer of more than ``SMALL_BYTES`` is sent beside which those that are being sent have more than
     ``max_bytes``. Clients that take theirs slowly keep others' large answers from being sent, and nothing else.
  3. A client that does not send the whole of its body within ``timeout_s`` is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

SMALL_BYTES = 1 << 20
"""An answer that is sent whoever else is slow."""


class Refused(Exception):
    """A body that is not taken: why, in words, in one word, and as a status of HTTP."""

    def __init__(self, message: str, kind: str, status: int) -> None:
        super().__init__(message)
        self.message, self.kind, self.status = message, kind, status


class Bodies:
    """Those of one router. ``max_body_bytes``: of one."""

    def __init__(self, *, max_body_bytes: int, max_bytes: int, timeout_s: float) -> None:
        self.num_bytes = 0
        self.num_answer_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def read(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A client's body; it counts until the context ends.

        Raises:
            Refused: when it is too large, too slow, or there is no room for it.
        """
        parts: list[bytes] = []
        num_bytes = 0
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for part in stream:
                        self.num_bytes += len(part)
                        num_bytes += len(part)
                        self._check(num_bytes)
                        parts.append(part)
            except TimeoutError:
                raise Refused(f"the body did not come within {self._timeout_s:g} s", "too_slow", 408) from None
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self.num_bytes -= num_bytes

    def has_room_to_send(self, num_bytes: int) -> bool:
        """Whether so large an answer may be sent now."""
        return num_bytes <= SMALL_BYTES or self.num_answer_bytes + num_bytes <= self._max_bytes

    @contextmanager
    def counted(self, num_bytes: int) -> Iterator[None]:
        """So much of an answer is in memory, until the context ends."""
        self.num_answer_bytes += num_bytes
        try:
            yield
        finally:
            self.num_answer_bytes -= num_bytes

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise Refused(f"more than {self._max_body_bytes} bytes", "too_large", 413)
        if self.num_bytes > self._max_bytes:
            message = f"the bodies of requests take more than {self._max_bytes >> 20} MiB (--max-buffered-mib)"
            raise Refused(message, "queue_full", 503)
