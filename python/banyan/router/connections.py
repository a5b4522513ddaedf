# SPDX-License-Identifier: Apache-2.0
"""Clients' connections, within bounds that uvicorn has none for: how many there are, how long one may take to ask, how
long it may hold up the others with what it sends, and how slowly it may take what it is sent.

A connection: asking (``HEADER_S`` at most, no matter how its bytes drip in) -> its request is under way -> asking ...
A client that does not read holds a place at a server, or an answer in memory: it is cut off.

What was read is handed to h11 in slices, for some of it takes long by the byte: lines of a header, and small chunks.
What is sent behind a request that has no answer yet is dropped, and the connection ends with that answer: it is read
all the same, for nothing else tells that the client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("banyan.router")

HEADER_S = 20.0
UNREAD_S = 600.0
LEAST_READ_BYTES_PER_S = 100
"""Slower than any connection: who takes less than that for ``UNREAD_S`` is not there."""

SLICE_BYTES = 4 << 10
HEADER_SLICE_BYTES = 512
TURN_S = 0.001
"""For slices of one connection, before it is the others' turn. One of chunks of a byte takes some 4 ms."""

MOST_HEADER_LINES = 256
OWN_FILES = 128
"""Descriptors that are not for requests: the process' own, and those of probes."""

FEED_FILES = 48
"""Of a server: of eight ranks, each with feeds of events and loads, and one for events of before. A socket of ZeroMQ
takes two. How many ranks servers have is not known when a router starts."""


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
    return max(1, (soft - OWN_FILES - FEED_FILES * num_servers) // (1 + num_servers))


class Bounded(H11Protocol):
    """uvicorn's protocol for one connection: of its two the one that bounds headers, and that this one is made of."""

    max_connections = most_connections(1)
    header_s = HEADER_S
    unread_s = UNREAD_S
    _timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _has_warned = False
    _turn: asyncio.Handle | None = None
    _num_header_lines = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._rest = bytearray()
        # It tells this connection, not its transport, what may be read.
        self.flow = FlowControl(cast(asyncio.Transport, self))
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
        self._rest.clear()
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
        # A request that has begun since has a cycle of its own.
        if self.cycle is cycle and (cycle is None or cycle.response_complete):
            # Waits for what is still to be sent, without end.
            self.transport.close()
            self._watch()

    # ---- what a client sends -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self._turn is None:
            self._hand_over()

    @property
    def _is_asked(self) -> bool:
        """Whether a whole request has come, and has no whole answer yet."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _hand_over(self) -> None:
        self._turn, end_s = None, time.monotonic() + TURN_S
        while self._rest and not self._is_asked and not self.transport.is_closing():
            is_header, num_bytes = self.conn.their_state is h11.IDLE, self._slice_bytes()
            piece = bytes(self._rest[:num_bytes])
            del self._rest[:num_bytes]
            super().data_received(piece)
            self._count_header_lines(piece.count(b"\n") if is_header else 0)
            if time.monotonic() >= end_s:
                break
        if self._is_asked and (self._rest or self.conn.trailing_data[0]):
            self._rest.clear()
            self.cycle.keep_alive = False
        elif self._rest and not self.transport.is_closing():
            self._turn = self.loop.call_soon(self._hand_over)
        self.resume_reading()

    def _slice_bytes(self) -> int:
        if self.conn.their_state is h11.IDLE:
            return HEADER_SLICE_BYTES
        is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        # A request that was answered early may have the header of the next one behind it.
        return SLICE_BYTES if is_chunked or self.cycle.response_complete else len(self._rest)

    def _count_header_lines(self, num_lines: int) -> None:
        is_header = self.conn.their_state is h11.IDLE
        self._num_header_lines = self._num_header_lines + num_lines if is_header else 0
        if self._num_header_lines > MOST_HEADER_LINES:
            self.send_400_response(f"more than {MOST_HEADER_LINES} lines of a header")

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            # An early answer has begun, and there is no other.
            self.transport.close()
        # What is still to be sent is waited for without end, and no timer is this request's.
        self._watch()

    def resume_reading(self) -> None:
        """Where there is room for more."""
        if self._rest or self.flow.read_paused:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    pause_reading = resume_reading

    # ---- what a client does not read ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        # One that is closing takes no more than it has.
        if not self.transport.is_closing():
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
        if num_bytes_before - self.transport.get_write_buffer_size() >= self.unread_s * LEAST_READ_BYTES_PER_S:
            self._watch()
        else:
            self.transport.abort()


def bounded(num_servers: int, unread_s: float) -> type[Bounded]:
    """The same for a router of so many servers, whose clients may read nothing for so long."""
    return type("Bounded", (Bounded,), {"max_connections": most_connections(num_servers), "unread_s": unread_s})
