# SPDX-License-Identifier: Apache-2.0
"""CURVE on ZeroMQ sockets that somebody else's code makes: who does not know the secret of all nodes is not heard.

Invariants
  1. A socket that listens inside ``listening`` drops everybody else in the handshake, before a message of his is read.
  2. One that connects after ``speaks`` talks to nobody who does not know the secret either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from banyan.telemetry import start_thread
from banyan.transport.sealed.secret import Keys
from banyan.transport.sealed.strangers import HANDSHAKE_FAILURES, HANDSHAKE_MS, Known, Strangers

Context = zmq.Context[zmq.Socket[bytes]]


@contextlib.contextmanager
def listening(context: Context, keys: Keys) -> Iterator[None]:
    """Sockets that are made of ``context`` in here are to listen. They admit who knows the secret, as long as the
    program runs."""
    # Before the options below, which are for sockets of the network: the gate's are not.
    gate = ThreadAuthenticator(context)
    gate.start()
    gate.configure_curve_callback(credentials_provider=Known(keys.borrower.public))
    before = dict(context.sockopts)
    context.setsockopt(zmq.CURVE_SERVER, 1)
    context.setsockopt(zmq.CURVE_SECRETKEY, keys.page_server.secret)
    context.setsockopt(zmq.CURVE_PUBLICKEY, keys.page_server.public)
    context.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    try:
        yield
    finally:
        context.sockopts.clear()
        context.sockopts.update(before)


def speaks(context: Context, keys: Keys) -> None:
    """Sockets that are made of ``context`` from now on connect, to those who know the secret."""
    context.setsockopt(zmq.CURVE_SERVERKEY, keys.page_server.public)
    context.setsockopt(zmq.CURVE_PUBLICKEY, keys.borrower.public)
    context.setsockopt(zmq.CURVE_SECRETKEY, keys.borrower.secret)


def is_sealed(socket: zmq.Socket[bytes]) -> bool:
    """Whether the options have taken: ZeroMQ's contexts pass over those that a socket refuses."""
    return bool(socket.getsockopt(zmq.MECHANISM) == zmq.CURVE)


def watch(socket: zmq.Socket[bytes], line: str) -> None:
    """Log ``line`` when a handshake of ``socket`` fails. To be called before the socket is used."""
    events = socket.get_monitor_socket(HANDSHAKE_FAILURES | zmq.Event.MONITOR_STOPPED)
    strangers = Strangers(line)

    def look() -> None:
        with events, contextlib.suppress(zmq.ContextTerminated):
            # A context waits at its end for this socket, too.
            while recv_monitor_message(events)["event"] != zmq.Event.MONITOR_STOPPED:
                strangers.came()

    start_thread(look, name="banyan-strangers", feature="saying who is not let in")


class SealedContext(zmq.Context[zmq.Socket[bytes]]):
    """Makes PUSH sockets that speak to who knows the secret, and says in the log when somebody does not."""

    line: str

    def __init__(self, keys: Keys, line: str) -> None:
        super().__init__()
        speaks(self, keys)
        self.line = line

    def socket(self, socket_type: int, *more: Any, **named: Any) -> zmq.Socket[bytes]:
        socket = super().socket(socket_type, *more, **named)
        if socket_type == zmq.PUSH:
            watch(socket, self.line)
        return socket
