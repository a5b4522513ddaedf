# SPDX-License-Identifier: Apache-2.0
"""A connection to another node's page server."""

from __future__ import annotations

import zmq

from banyan.core import Address
from banyan.features.nodes.wire import MAX_MESSAGE_BYTES
from banyan.transport.sealed.secret import Keys
from banyan.transport.sealed.strangers import HANDSHAKE_MS

RECONNECT_MS = 500
MOST_RECONNECT_MS = 10_000


def connect(context: zmq.Context[zmq.Socket[bytes]], node: Address, keys: Keys) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.page_server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.borrower.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.borrower.secret)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # Questions to a node that is not there are not kept for it.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, ":" in node.host)
    socket.connect(node.endpoint)
    return socket
