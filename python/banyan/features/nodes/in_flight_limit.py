# SPDX-License-Identifier: Apache-2.0
"""How much of what is lent is under way at once: in this host's queues and in the network, sent and not acknowledged.

Whatever shares a queue with remote leases waits behind what is in it. A kernel lets a connection have megabytes under
way; here all of them together have a stated number of bytes, leave evenly instead of in bursts, and stand behind other
traffic in the host's own queue.

Invariants
  1. The connections of one limit have at most its bytes under way together, but for one packet each and for what is
     said below; while another one joins, what the others had under way counts as before.
  2. Each of them has an equal part, and never less than `LEAST_PACKETS`.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger("banyan")

LEAST_PACKETS = 4
"""With less than two a connection waits for each acknowledgement, which a reader puts off by 40 ms."""

BULK = 2
"""Linux's class for bulk traffic: by default a host's queue sends everything else before it."""

SO_MAX_PACING_RATE = 47
"""Linux's number, which Python does not name."""

CONGESTION_CONTROL = b"cubic"
"""Linux's own choice: a packet leaves when another has arrived. A system may have chosen BBR, which starts a timer for
each packet (docs/network.md says what that costs). What is under way is bounded here, whichever it is."""

PACED_BYTES_PER_S = (1 << 62) - 2
"""So fast that the kernel's own pace counts: one window in a round trip. A kernel that takes four of the eight bytes
sees 4 GB/s."""


class InFlightLimit:
    """The connections of one lender. Any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    @contextmanager
    def joined(self, connection: socket.socket) -> Iterator[None]:
        """``connection`` sends within the bound."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)
        # A kernel without it, or that reserves it, goes on with its own.
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, PACED_BYTES_PER_S.to_bytes(8, "little"))
        with self._lock:
            self._connections.append(connection)
            self._divide()
        try:
            yield
        finally:
            with self._lock:
                self._connections.remove(connection)
                self._divide()

    def _divide(self) -> None:
        for connection in self._connections:
            packet_bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            part_bytes = max(LEAST_PACKETS * packet_bytes, self._most_bytes // len(self._connections))
            # The kernel takes twice what it is told, for its own part of each packet.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, part_bytes // 2)
            had_bytes = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            if had_bytes + 1 < part_bytes:
                _say_cut(had_bytes, part_bytes)


@functools.cache
def _say_cut(had_bytes: int, part_bytes: int) -> None:
    logger.warning(
        "banyan: the kernel lets a remote lease have %d of %d bytes of --banyan-in-flight-kb under way: raise "
        "net.core.wmem_max",
        had_bytes,
        part_bytes,
    )
