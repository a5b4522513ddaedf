# SPDX-License-Identifier: Apache-2.0
"""The bytes of a remote lease over plain TCP: its token goes one way, its pages come back layer by layer.

A reader opens a connection, writes the token and reads all pages of layer 0, then of layer 1, and so on; nothing else
is sent. Both ends know the sizes. What comes is believed only by its checksums.

Both wait in the kernel for all that one system call names: a thread that has to have the interpreter's lock for each
acknowledgement waits for milliseconds beside a busy scheduler, with little under way and the path idle.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from banyan.core import Address
from banyan.features.nodes.callers import Callers
from banyan.features.nodes.in_flight_limit import InFlightLimit
from banyan.features.nodes.path_probe import MOST_PROBES_AT_ONCE
from banyan.features.nodes.remote_leases import MAX_REMOTE_LEASES, Layers, RemoteLeases
from banyan.telemetry import start_thread

logger = logging.getLogger("banyan")

STALL_S = 1.5
"""An end that moves no byte for so long, or for up to ``LOOK_S`` longer, is taken for dead."""

LOOK_S = 0.25
"""How long one call waits. When it has moved a part of its bytes, it does not say how long ago the last of them was."""

SLOW_S, LEAST_BYTES_PER_S = 10.0, 4 << 20
"""A pull takes no longer than so many seconds beside what its bytes take at this rate: a forward may be waiting for it,
and with that the whole rank, however steadily single bytes come."""

MOST_S = 30.0
"""And no longer than this, however large it is: SGLang ends a server that stands still for minutes."""

IN_FLIGHT_BYTES = 512 << 10
"""More than a connection over a network of one site needs to be as fast as it can."""

MAX_CONNECTIONS = MAX_REMOTE_LEASES + MOST_PROBES_AT_ONCE
"""One for each remote lease that is out."""

LENDING = "lending pages to other nodes"
MAX_VIEWS = 512
"""Pieces that one system call moves: below any kernel's limit."""


class Pace:
    """How late each further layer may be, from now on."""

    def __init__(self, slow_s: float) -> None:
        self._until_s = time.monotonic() + slow_s
        self._most_s = time.monotonic() + max(MOST_S, slow_s)

    def until_s(self, num_bytes: int) -> float:
        """These are next."""
        self._until_s += num_bytes / LEAST_BYTES_PER_S
        return min(self._until_s, self._most_s)


class TcpCarrier:
    """The reader's end: brings the bytes of a remote lease. ``dscp``: what both ends mark their packets with;
    ``carried`` sees each connection that has brought all; ``slow_s``: `SLOW_S`, where nobody waits but a person, and
    then the most, too, where it is more."""

    def __init__(
        self,
        dscp: int | None = None,
        *,
        carried: Callable[[socket.socket], None] = lambda connection: None,
        slow_s: float = SLOW_S,
    ) -> None:
        self._dscp = dscp
        self._carried = carried
        self._slow_s = slow_s

    def pull(
        self,
        source: Address,
        token: bytes,
        target: Layers,
        num_layers: int,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Generator[int, None, None]:
        """Yield each layer when its bytes are in ``target``, in order, as long as it ``is_wanted``. Nothing is written
        after the iterator was closed or has raised.

        Raises:
            OSError: when the source is gone, silent or too slow, or ends early, or it is not wanted any more.
        """
        pace = Pace(self._slow_s)
        with socket.create_connection((source.host, source.port), timeout=STALL_S) as connection:
            mark(connection, self._dscp)
            connection.sendall(token)
            wait_in_kernel(connection)
            for layer in range(num_layers):
                views = target.layer(layer)
                _receive(connection, views, pace.until_s(sum(map(len, views))), is_wanted)
                yield layer
            self._carried(connection)


def mark(connection: socket.socket, dscp: int | None) -> None:
    """Give the packets of a socket this DSCP; None: the network's own."""
    if dscp is None:
        return
    # The field's lower two bits are for congestion marks.
    if connection.family == socket.AF_INET6:
        connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    # On a socket of IPv6, too: what it says to addresses of IPv4 are packets of IPv4.
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def wait_in_kernel(connection: socket.socket) -> None:
    """From now on a call on ``connection`` returns when all of its bytes have passed, or ``LOOK_S`` later with some of
    them; with none it raises ``BlockingIOError``."""
    look = struct.pack("ll", int(LOOK_S), round(LOOK_S % 1 * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, look)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, look)


def _receive(connection: socket.socket, views: list[memoryview], until_s: float, is_wanted: Callable[[], bool]) -> None:
    def move(batch: list[memoryview]) -> int:
        num_bytes = connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        if num_bytes == 0:
            raise ConnectionError("the source has ended early")
        return num_bytes

    _move_all(views, move, until_s, is_wanted)


def _send(
    connection: socket.socket, views: list[memoryview], until_s: float, is_lent: Callable[[], bool] = lambda: True
) -> None:
    _move_all(views, connection.sendmsg, until_s, is_lent)


def _move_all(
    views: list[memoryview], move: Callable[[list[memoryview]], int], until_s: float, goes_on: Callable[[], bool]
) -> None:
    """Call ``move`` until all has passed.

    Raises:
        OSError: when nothing passes for ``STALL_S``, when it is later than ``until_s``, when it does not go on, or as
            ``move`` says.
    """
    for batch in _batches(views):
        moved_s = time.monotonic()
        while batch:
            if time.monotonic() >= until_s:
                raise TimeoutError("bytes pass too slowly to be waited for")
            if not goes_on():
                raise ConnectionAbortedError("nobody waits for it any more")
            try:
                num_bytes = move(batch)
            except BlockingIOError:
                if time.monotonic() - moved_s >= STALL_S:
                    raise TimeoutError(f"no byte has passed for {STALL_S} s") from None
            else:
                moved_s = time.monotonic()
                batch = _rest(batch, num_bytes)


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    for start in range(0, len(views), MAX_VIEWS):
        yield list(views[start : start + MAX_VIEWS])


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left behind the first ``num_bytes``."""
    for place, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[place + 1 :]]
        num_bytes -= len(view)
    return []


def _listener(address: Address) -> socket.socket:
    """Listens at ``address``; where that is all of a host's, at those of IPv4 as well, as ZeroMQ does.

    Raises:
        OSError: when it cannot be listened on.
    """
    is_ipv6 = ":" in address.host
    return socket.create_server(
        (address.host, address.port),
        family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        backlog=MAX_CONNECTIONS,
        dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
    )


class TcpSource:
    """The lender's end: listens, and sends what is lent. A thread for each remote lease, `MAX_CONNECTIONS` at most; who
    shows no token of one has none."""

    def __init__(
        self,
        address: Address,
        remote_leases: RemoteLeases,
        *,
        num_layers: int,
        dscp: int | None = None,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``in_flight_bytes``: of all remote leases together (``flight``). ``ended``: called when a fault ends its
        listening.

        Raises:
            OSError: when the address cannot be listened on.
        """
        self._remote_leases = remote_leases
        self._num_layers = num_layers
        self._dscp = dscp
        self._in_flight_limit = InFlightLimit(in_flight_bytes)
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._sending = threading.Condition()
        self._num_sending = 0
        self._listener = _listener(address)
        self.port: int = self._listener.getsockname()[1]
        self.sent_bytes = 0
        self._callers = Callers(self._listener, self._came)
        self._thread = start_thread(self._callers.run, name="banyan-lend", feature=LENDING, ended=ended)

    def settle(self) -> None:
        """Wait until nothing that was lent is being read: after the remote leases were called in, no longer than a
        stalled reader is waited for."""
        with self._sending:
            self._sending.wait_for(lambda: self._num_sending == 0, timeout=2 * STALL_S)

    def close(self) -> None:
        self._callers.close()
        self._thread.join()
        self._listener.close()

    def _came(self, connection: socket.socket, token: bytes) -> None:
        """Somebody has shown a token. The callers' thread."""
        try:
            mark(connection, self._dscp)
            wait_in_kernel(connection)
        except OSError:
            # It has left.
            connection.close()
            return
        if self._remote_leases.find(token) is None or not self._room.acquire(blocking=False):
            connection.close()
            return
        try:
            start_thread(
                partial(self._serve, connection, token), name="banyan-lend-one", feature="a remote lease's bytes"
            )
        except RuntimeError as error:
            # The system has no thread left: its borrower computes instead.
            logger.warning("banyan: a remote lease is not sent: %s", error)
            self._room.release()
            connection.close()

    def _serve(self, connection: socket.socket, token: bytes) -> None:
        try:
            # Behind the mark, which sets the host's own priority too.
            with connection, self._in_flight_limit.joined(connection):
                self._send_remote_lease(connection, token)
        except OSError as error:
            # The reader has left, or stands still: it does not come again.
            logger.debug("banyan: a reader's connection has ended: %s", error)
            self._remote_leases.give_back(token)
        finally:
            self._room.release()

    def _send_remote_lease(self, connection: socket.socket, token: bytes) -> None:
        pace = Pace(SLOW_S)
        for layer in range(self._num_layers):
            if not self._send_layer(connection, token, layer, pace):
                return

    def _send_layer(self, connection: socket.socket, token: bytes, layer: int, pace: Pace) -> bool:
        with self._sending:
            lent = self._remote_leases.find(token)
            if lent is None:
                return False
            self._num_sending += 1
        views = lent.leased_frames.layer(layer)
        num_bytes = sum(map(len, views))
        try:
            # A reader that is called in, or drips, holds neither the arena nor whoever waits for it.
            _send(connection, views, pace.until_s(num_bytes), partial(self._remote_leases.holds, token))
            with self._sending:
                self.sent_bytes += num_bytes
        finally:
            del lent, views
            with self._sending:
                self._num_sending -= 1
                self._sending.notify_all()
        return True
