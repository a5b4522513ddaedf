# SPDX-License-Identifier: Apache-2.0
"""Connections at a lender's port before they have shown a token: anybody can make them, so they cost little.

Invariants
  1. A caller has ``TOKEN_S`` in all for its token, no matter how its bytes drip in.
  2. No more than ``MAX_CALLERS`` are listened to at once, and ``MAX_PER_ORIGIN`` of one origin: an address of IPv4, or
     a network of IPv6. The next is closed at once. None of them has a thread.
  3. What accepting a connection runs into, too many open files above all, passes: it is tried again.

A caller: accepted -> its token has come, and it is somebody else's -> or closed. One thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from banyan.features.nodes.wire import TOKEN_BYTES

logger = logging.getLogger("banyan")

TOKEN_S = 1.5
MAX_CALLERS = 128
MAX_PER_ORIGIN = 16
LOOK_S = 0.25
IPV4_MAPPED = bytes(10) + b"\xff\xff"
PAUSE_S = 0.1
"""Before a connection is accepted again where that has failed."""


@dataclass(eq=False)
class _Caller:
    connection: socket.socket
    origin: str
    until_s: float
    token: bytearray = field(default_factory=bytearray)


class Callers:
    """Those at ``listener``, which is owned. ``came`` takes a connection over, with what it has shown."""

    def __init__(self, listener: socket.socket, came: Callable[[socket.socket, bytes], None]) -> None:
        self._listener = listener
        self._came = came
        self._selector = selectors.DefaultSelector()
        self._callers: list[_Caller] = []
        self._num_of: Counter[str] = Counter()
        self._has_ended = False
        self.num_faults = 0
        """Connections that could not be accepted."""

    def run(self) -> None:
        """Listen until ``close``."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._has_ended:
                for key, _ in self._selector.select(LOOK_S):
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.data)
                self._give_up()
        finally:
            for caller in list(self._callers):
                self._drop(caller)
            self._selector.close()

    def close(self) -> None:
        """Any thread. ``run`` returns soon."""
        self._has_ended = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._stumbled(error)
            return
        connection.setblocking(False)
        caller = _Caller(connection, _origin(address[0]), time.monotonic() + TOKEN_S)
        if len(self._callers) >= MAX_CALLERS or self._num_of[caller.origin] >= MAX_PER_ORIGIN:
            connection.close()
            return
        self._callers.append(caller)
        self._num_of[caller.origin] += 1
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _stumbled(self, error: OSError) -> None:
        if self._has_ended:
            return
        self.num_faults += 1
        if self.num_faults == 1:
            logger.warning("banyan: a borrower's connection could not be accepted, and is tried again: %s", error)
        time.sleep(PAUSE_S)

    def _hear(self, caller: _Caller) -> None:
        try:
            piece = caller.connection.recv(TOKEN_BYTES - len(caller.token))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.token += piece
        if len(caller.token) == TOKEN_BYTES:
            self._forget(caller)
            self._came(caller.connection, bytes(caller.token))
        elif not piece:
            self._drop(caller)

    def _give_up(self) -> None:
        now_s = time.monotonic()
        # In the order in which they came, which is that of their time.
        while self._callers and self._callers[0].until_s <= now_s:
            self._drop(self._callers[0])

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)
        self._num_of[caller.origin] -= 1
        if not self._num_of[caller.origin]:
            del self._num_of[caller.origin]

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()


def _origin(address: str) -> str:
    """Whoever has one address of IPv6 has the network around it, but for those that stand for one of IPv4."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return socket.inet_ntoa(packed[12:]) if packed.startswith(IPV4_MAPPED) else packed[:8].hex()
