# SPDX-License-Identifier: Apache-2.0
"""A node's page server: it answers other nodes that know the secret, and lends them pages of the host arena.

Invariants
  1. Only who knows the secret is heard: ZeroMQ drops everybody else in the handshake. What cannot be read as a message
     is dropped and counted; nothing that arrives ends the page server.
  2. One thread owns the socket, and does nothing that takes long: remote leases are made on two others, for the sake
     of their checksums. What is said, `Lending` decides; the bytes go out through `TcpSource`, on threads of its own.
     Reads of the store that others ask for are the rank's to carry out (`RemotePrefetches`).
  3. A borrower that has vanished is noticed, and costs nothing from then on.

States: open -> closed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from banyan.core import Address
from banyan.features.nodes.lending import OTHER_WEIGHTS, Lending
from banyan.features.nodes.nixl_pulls import LentByNixl
from banyan.features.nodes.remote_prefetches import RemotePrefetch, RemotePrefetches
from banyan.features.nodes.tcp import IN_FLIGHT_BYTES, LENDING, TcpSource
from banyan.features.nodes.wire import (
    KEY_BYTES,
    MAX_QUESTION_BYTES,
    Borrow,
    Foreign,
    Read,
    Reading,
    Refused,
    Return,
    ToBorrower,
    ToPageServer,
    encode,
    read_by_page_server,
    unpack_keys,
)
from banyan.pacing.allowance import Allowance
from banyan.telemetry import start_thread
from banyan.transport.lost_peers import notice_silence
from banyan.transport.sealed.secret import Keys
from banyan.transport.sealed.strangers import HANDSHAKE_FAILURES, HANDSHAKE_MS, Known, Strangers

logger = logging.getLogger("banyan")

TICK_MS = 100
MESSAGES_PER_S = 2000
MOST_QUEUED = 64
"""Of one borrower's messages, and of what is said to it."""

MOST_BORROWING = 64
"""Remote leases that wait to be made."""

NUM_SUMMING = 2


class PageServer:
    """Listens from the moment it is made. Any thread."""

    def __init__(
        self,
        address: Address,
        keys: Keys,
        *,
        max_pages: int,
        num_layers: int,
        dscp: int | None = None,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        by_nixl: LentByNixl | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_pages``: lent at once. ``dscp``: marks the bytes of remote leases, of which ``in_flight_bytes`` at most
        are under way. ``by_nixl``: reads of what is lent.

        Raises:
            OSError: when the address, or the port behind it, cannot be listened on.
        """
        self.address = address
        self.lending = Lending(max_pages=max_pages, clock=clock, by_nixl=by_nixl)
        self.num_foreign = 0
        self._remote_prefetches: RemotePrefetches | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clock = clock
        self._allowance = Allowance(per_s=MESSAGES_PER_S, burst=MESSAGES_PER_S, now_s=clock())
        self._has_ended = False
        self._borrows: SimpleQueue[tuple[bytes, Borrow] | None] = SimpleQueue()
        self._lent: deque[tuple[bytes, ToBorrower]] = deque()
        self._context = zmq.Context()
        self._source = TcpSource(
            Address(address.host, address.port + 1),
            self.lending.remote_leases,
            num_layers=num_layers,
            dscp=dscp,
            in_flight_bytes=in_flight_bytes,
            ended=self.lending.end,
        )
        try:
            self._listen(keys)
        except zmq.ZMQError as error:
            self._source.close()
            os.close(self._wake)
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{address}: {error}") from error
        self._thread = start_thread(self._run, name="banyan-page-server", feature=LENDING, ended=self._off)
        self._summing = [
            start_thread(self._sum, name="banyan-lend-sums", feature=LENDING, ended=self._off)
            for _ in range(NUM_SUMMING)
        ]

    def _listen(self, keys: Keys) -> None:
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=Known(keys.borrower.public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.page_server.secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.page_server.public)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        self._socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        notice_silence(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in self.address.host)
        self._watch = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._strangers = Strangers(
            f"the page server at {self.address}: one who does not know the secret is not let in"
        )
        try:
            self._socket.bind(self.address.endpoint)
        except zmq.ZMQError:
            _end(self._gate)
            raise

    @property
    def sent_bytes(self) -> int:
        return self._source.sent_bytes

    @property
    def most_remote_prefetch_pages(self) -> int:
        """How many pages it reads for others at once; 0: it does not."""
        return 0 if self._remote_prefetches is None else self._remote_prefetches.max_pages

    def take_remote_prefetches(self, *, max_pages: int) -> RemotePrefetches:
        """From now on take remote prefetches, of ``max_pages`` together; whoever calls carries them out."""
        self._remote_prefetches = RemotePrefetches(
            max_pages=max_pages,
            remote_leases=self.lending.remote_leases,
            clock=self._clock,
            wake=lambda: os.eventfd_write(self._wake, 1),
        )
        return self._remote_prefetches

    def withdraw(self) -> None:
        """Lend nothing any more; what was lent is called in. When this returns, the page server holds nothing of its
        export."""
        if self._remote_prefetches is not None:
            self._remote_prefetches.end()
        self.lending.withdraw()
        self._source.settle()

    def close(self) -> None:
        self.withdraw()
        self._has_ended = True
        self._thread.join()
        for _ in self._summing:
            self._borrows.put(None)
        for thread in self._summing:
            thread.join()
        self._source.close()
        self._remote_prefetches = None
        os.close(self._wake)

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._listen_on()
        finally:
            self._socket.disable_monitor()
            _end(self._gate)
            self._context.destroy(linger=0)

    def _sum(self) -> None:
        """Make remote leases. A thread of its own."""
        while (borrow := self._borrows.get()) is not None:
            self._lend(*borrow)

    def _lend(self, sender: bytes, message: Borrow) -> None:
        remote_prefetches = self._remote_prefetches
        brought = None
        if remote_prefetches is not None:
            brought = remote_prefetches.take_brought(sender, unpack_keys(message.keys[:KEY_BYTES])[0])
        try:
            num_reserved = 0 if brought is None else brought.num_pages
            answer = self.lending.borrow(message, port=self._source.port, num_reserved=num_reserved)
        finally:
            if brought is not None and remote_prefetches is not None:
                remote_prefetches.borrowed(brought)
        self._lent.append((sender, answer))
        os.eventfd_write(self._wake, 1)

    def _off(self) -> None:
        """A thread has ended by a fault: nothing is lent, and nobody waits for a remote prefetch."""
        if self._remote_prefetches is not None:
            self._remote_prefetches.end()
        self.lending.end()

    def _listen_on(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._watch, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._has_ended:
            ready = dict(poller.poll(TICK_MS))
            if self._watch in ready:
                recv_monitor_message(self._watch)
                self._strangers.came()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._socket in ready:
                self._answer(self._socket.recv_multipart())
            while self._lent:
                self._send(*self._lent.popleft())
            if self._remote_prefetches is not None:
                for sender, said in self._remote_prefetches.to_say():
                    self._send(sender, said)
            self.lending.remote_leases.expire()
            if not self._gate.is_alive():
                raise RuntimeError("ZeroMQ's authenticator has ended: nobody could come in any more")

    def _answer(self, frames: list[bytes]) -> None:
        sender, payload = frames[0], frames[-1]
        try:
            message = read_by_page_server(payload)
        except Foreign as error:
            self.num_foreign += 1
            logger.debug("banyan: the page server was sent what no node sends: %s", error)
            return
        answer = self._answer_to(sender, message)
        if answer is not None:
            self._send(sender, answer)

    def _send(self, receiver: bytes, answer: ToBorrower) -> None:
        try:
            self._socket.send_multipart([receiver, encode(answer)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # It left, or takes nothing: a remote lease that it does not know of runs out.
            logger.debug("banyan: an answer of the page server could not be sent: %s", error)

    def _answer_to(self, sender: bytes, message: ToPageServer) -> ToBorrower | None:
        if not isinstance(message, Return) and not self._allowance.take(1, self._clock()):
            return Refused(message.number, "too many messages")
        if isinstance(message, Read):
            return self._take(sender, message)
        if isinstance(message, Borrow):
            return self._begin_to_lend(sender, message)
        return self.lending.answer(message, port=self._source.port)

    def _begin_to_lend(self, sender: bytes, message: Borrow) -> ToBorrower | None:
        if self._borrows.qsize() >= MOST_BORROWING:
            self.lending.num_refused += 1
            return Refused(message.number, "too much is being lent")
        self._borrows.put((sender, message))
        return None

    def _take(self, sender: bytes, wanted: Read) -> ToBorrower:
        """Take a remote prefetch; what to say to it now."""
        if self._remote_prefetches is None:
            return Refused(wanted.number, "it has no --banyan-store to read for others")
        if not self.lending.lends(wanted.namespace):
            return Refused(wanted.number, OTHER_WEIGHTS)
        if not self._remote_prefetches.ask(RemotePrefetch(sender, wanted.number, unpack_keys(wanted.keys))):
            return Refused(wanted.number, "too much is being read")
        return Reading(wanted.number)


def _end(gate: ThreadAuthenticator) -> None:
    """Stop it. One whose thread has ended by a fault would wait for ever for room in a queue that nobody reads."""
    if not gate.is_alive():
        gate.pipe.close(linger=0)
        gate.pipe = None  # type: ignore[assignment]
    gate.stop()
