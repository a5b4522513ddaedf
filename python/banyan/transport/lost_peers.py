# SPDX-License-Identifier: Apache-2.0
"""Connections of ZeroMQ whose other end has vanished without a word."""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_MS = 5_000
SILENCE_MS = 10_000
"""A connection that carries nothing for so long, heartbeats included, is given up. A path may forget one that is idle
and tell neither end, and a host that loses its power says nothing."""


def notice_silence(socket: zmq.Socket[Any]) -> None:
    """Give up connections whose other end has vanished. Before it binds or connects."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
