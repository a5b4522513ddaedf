# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: read from clients, and kept until an answer begins, for another attempt. And those of
answers, from when they come from a server until their clients have taken them.

Invariants
  1. All bodies of requests together, read in part or whole, have no more than ``max_bytes`` in memory. Of these an
     eighth is for small ones alone, and no client has more than a half, unless one body does. What is read of them does
     not count: text, tokens and page ids mostly have twice as much, and six times where a token is two bytes and a page
     one token.
  2. Whole answers and events of more than ``SMALL_BYTES``, read in part or whole, are read on only while all answers
     together have no more than ``max_bytes``. Clients that take theirs slowly keep others' large answers away, and
     nothing else.
  3. A client that does not send the whole of its body within ``timeout_s`` is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_BYTES = 1 << 20
"""A body that has room, and an answer that is sent, whoever else is slow."""


class Refused(Exception):
    """A body that is not taken: why, in words, in one word, and as a status of HTTP."""

    def __init__(self, message: str, kind: str, status: int) -> None:
        super().__init__(message)
        self.message, self.kind, self.status = message, kind, status


class _Room:
    """``most_bytes`` for bodies, of which an eighth is for small ones alone, unless one large one needs it."""

    def __init__(self, most_bytes: int, max_body_bytes: int) -> None:
        self.num_bytes = self.num_bodies = 0
        self._num_large_bytes = 0
        self._most_bytes = max(most_bytes, max_body_bytes)
        self._most_large_bytes = max(self._most_bytes * 7 // 8, max_body_bytes)

    def has_changed(self, before: int, now: int) -> None:
        """One body had so many bytes before, and has so many now."""
        self.num_bytes += now - before
        self._num_large_bytes += _if_large(now) - _if_large(before)

    def has_too_many(self, num_bytes: int) -> bool:
        """Whether one of so many bytes is too much."""
        return self.num_bytes > self._most_bytes or (
            num_bytes > SMALL_BYTES and self._num_large_bytes > self._most_large_bytes
        )


class Bodies:
    """Those of one router. ``max_body_bytes``: of one."""

    def __init__(self, *, max_body_bytes: int, max_bytes: int, timeout_s: float) -> None:
        self.num_answer_bytes = 0
        self.max_bytes = max_bytes
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s
        self._all = _Room(max_bytes, max_body_bytes)
        self._of_clients: dict[str, _Room] = {}

    @asynccontextmanager
    async def read(self, stream: AsyncIterator[bytes], client: str) -> AsyncIterator[bytes]:
        """A body; it counts until the context ends. ``client``: whose it is.

        Raises:
            Refused: when it is too large, too slow, or there is no room for it.
        """
        parts: list[bytes] = []
        num_bytes = 0
        own = self._of_clients.setdefault(client, _Room(self.max_bytes // 2, self._max_body_bytes))
        own.num_bodies += 1
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for part in stream:
                        before, num_bytes = num_bytes, num_bytes + len(part)
                        for room in (self._all, own):
                            room.has_changed(before, num_bytes)
                        self._check(own, num_bytes)
                        parts.append(part)
            except TimeoutError:
                raise Refused(f"the body did not come within {self._timeout_s:g} s", "too_slow", 408) from None
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            for room in (self._all, own):
                room.has_changed(num_bytes, 0)
            own.num_bodies -= 1
            if not own.num_bodies:
                del self._of_clients[client]

    def _check(self, own: _Room, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise Refused(f"more than {self._max_body_bytes} bytes (--max-body-mib)", "too_large", 413)
        for room, whose in ((own, "your requests take half"), (self._all, "requests take all there is for them")):
            if room.has_too_many(num_bytes):
                message = f"the bodies of {whose} of {self.max_bytes >> 20} MiB (--max-buffered-mib)"
                raise Refused(message, "queue_full", 503)


class Answers:
    """Those to one request, as far as they are in memory: one, or one of each server."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self._is_over = False

    def come(self, num_bytes: int) -> None:
        """So much more of one.

        Raises:
            Refused: when they are large and there is no room for them, or nobody waits for them any more.
        """
        if self._is_over:
            raise Refused("nobody waits for it any more", "gone", 503)
        self.are(self._num_bytes + num_bytes)
        if self._num_bytes > SMALL_BYTES and self._bodies.num_answer_bytes > self._bodies.max_bytes:
            raise Refused("clients leave too large answers unread (--max-buffered-mib)", "queue_full", 503)

    def are(self, num_bytes: int) -> None:
        """So much is left of them."""
        self._bodies.num_answer_bytes += num_bytes - self._num_bytes
        self._num_bytes = num_bytes

    def end(self) -> None:
        """The client has what it gets."""
        self.are(0)
        self._is_over = True


def _if_large(num_bytes: int) -> int:
    return num_bytes if num_bytes > SMALL_BYTES else 0
