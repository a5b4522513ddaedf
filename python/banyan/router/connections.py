# SPDX-License-Identifier: Apache-2.0
"""Clients' connections, within bounds that uvicorn has none for: how many there are, how long one may take to ask, and
how long it may take nothing of what it is sent.

A connection: asking (``HEADER_S`` at most, no matter how its bytes drip in) -> its request is under way -> asking ...
A client that does not read holds a place at a server, or an answer in memory: it is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("banyan.router")

HEADER_S = 20.0
UNREAD_S = 600.0
OWN_FILES = 128
"""Descriptors that are not for requests: the process' own, and those of servers' events and probes."""


def take_open_files() -> None:
    """Have as many descriptors as the process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections(num_servers: int) -> int:
    """As many as there are descriptors for, when each has a request under way. Of a pair both servers get it, and what
    is for all servers each of them: without descriptors no probe is answered, and all servers count as down."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 20
    return max(1, (soft - OWN_FILES) // (1 + num_servers))


class Bounded(H11Protocol):
    """uvicorn's protocol for one connection: of its two the one that bounds headers, and that this one is made of."""

    max_connections = most_connections(1)
    header_s = HEADER_S
    unread_s = UNREAD_S
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _has_warned = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            if not Bounded._has_warned:
                Bounded._has_warned = True
                logger.warning(
                    "more than %d connections: the next ones are closed at once; raise the limit of open files "
                    "(ulimit -Hn)",
                    self.max_connections,
                )
            transport.abort()
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self.header_s, self._give_up, self.cycle)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self, cycle: Any) -> None:
        # A request that has begun since has a cycle of its own; one that was sent behind the last is under way already.
        if self.cycle is cycle and (cycle is None or cycle.response_complete):
            # Waits for what is still to be sent, without end.
            self.transport.close()
            self._watch()

    # ---- what a client does not read ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self) -> None:
        self._stop_watching()
        num_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self.unread_s, self._look_at_unread, num_bytes)

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def _look_at_unread(self, num_bytes_before: int) -> None:
        if self.transport.get_write_buffer_size() < num_bytes_before:
            self._watch()
        else:
            self.transport.abort()


def bounded(num_servers: int, unread_s: float) -> type[Bounded]:
    """The same for a router of so many servers, whose clients may read nothing for so long."""
    return type("Bounded", (Bounded,), {"max_connections": most_connections(num_servers), "unread_s": unread_s})
