# SPDX-License-Identifier: Apache-2.0
"""A rank's connections to the page servers of other nodes, and what wakes the thread that owns them.

States: open -> closed. One thread sends, waits and closes; any thread may ``wake``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import AF_INET, getaddrinfo

import zmq
from zmq.utils.monitor import recv_monitor_message

from banyan.core import Address
from banyan.features.nodes.wire import MAX_MESSAGE_BYTES, ToPageServer, encode
from banyan.transport.lost_peers import notice_silence
from banyan.transport.sealed.secret import Keys
from banyan.transport.sealed.strangers import HANDSHAKE_FAILURES, HANDSHAKE_MS, Strangers

HANDSHAKES = HANDSHAKE_FAILURES | zmq.Event.HANDSHAKE_SUCCEEDED
LINGER_MS = 100
RECONNECT_MS = 500
MOST_RECONNECT_MS = 10_000
CONNECT_MS = 3_000

MOST_QUEUED = 64
"""Messages of one node, before the thread that waits takes them. A node that sends more waits."""


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message, and the address that it came from: a name may mean several, or not be found any more."""

    node: int
    payload: bytes
    host: str


class NodeConnections:
    """One connection for each of ``nodes``, which are called by their places. ``connected`` is told, by the thread that
    waits, when one has let this node in, ``rejected`` when one has not."""

    def __init__(
        self,
        nodes: Sequence[Address],
        keys: Keys,
        *,
        connected: Callable[[int], None],
        rejected: Callable[[int], None] = lambda node: None,
    ) -> None:
        self._connected = connected
        self._rejected = rejected
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._strangers = [
            Strangers(f"the node at {node} does not let this one in: compare the files of --banyan-secret-file")
            for node in nodes
        ]
        self._sockets = [_connect(self._context, node, keys) for node in nodes]
        self._monitors = [socket.get_monitor_socket(HANDSHAKES) for socket in self._sockets]
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup, zmq.POLLIN)
        for socket in (*self._sockets, *self._monitors):
            self._poller.register(socket, zmq.POLLIN)

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        os.eventfd_write(self._wakeup, 1)

    def wait(self, timeout_ms: int) -> list[NodeMessage]:
        """Wait for messages or the wakeup; at most one message of each node. Says when a node refuses a handshake."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        for node, monitor in enumerate(self._monitors):
            if monitor in ready:
                if recv_monitor_message(monitor)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._connected(node)
                else:
                    self._strangers[node].came()
                    self._rejected(node)
        return [_heard(node, socket) for node, socket in enumerate(self._sockets) if socket in ready]

    def send(self, node: int, message: ToPageServer) -> bool:
        """Never waits; whether there was room for it."""
        try:
            self._sockets[node].send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def hang_up(self) -> None:
        """Close the connections; what has been sent has a moment to leave."""
        for socket in self._sockets:
            socket.disable_monitor()
        self._context.destroy(linger=LINGER_MS)

    def close(self) -> None:
        """Take the wakeup away, once nobody waits or wakes it any more."""
        os.close(self._wakeup)


def _heard(node: int, socket: zmq.Socket[bytes]) -> NodeMessage:
    frame = socket.recv(copy=False)
    return NodeMessage(node, frame.bytes, str(frame.get("Peer-Address")))


@functools.cache
def _is_of_ipv6(host: str) -> bool:
    """Whether no address of IPv4 is known. ZeroMQ, told to look for those of IPv6, finds one of IPv4 only where there
    are no others: of a name that has both it would not find who listens at IPv4 alone. Looked up once, at the start: a
    name server may not answer."""
    try:
        getaddrinfo(host, None, AF_INET)
    except OSError:
        return True
    return False


def _connect(context: zmq.Context[zmq.Socket[bytes]], node: Address, keys: Keys) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.page_server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.borrower.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.borrower.secret)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RCVHWM, MOST_QUEUED)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    notice_silence(socket)
    # Questions to a node that is not there are not kept for it.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, _is_of_ipv6(node.host))
    socket.connect(node.endpoint)
    return socket
