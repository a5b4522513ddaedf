# SPDX-License-Identifier: Apache-2.0
"""The path to another node's page server, tried as a server would use it: is it let in, how soon is it answered, what
do the bytes of remote leases come at. Blocks, some ten seconds at most but for slow paths; for tools.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from banyan.core import Address
from banyan.features.nodes.node_connections import NodeConnections
from banyan.features.nodes.path_probe import PROBES_PER_S, TOO_MANY
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import (
    MAX_PROBE_BYTES,
    NAMESPACE_BYTES,
    Ask,
    Foreign,
    Probe,
    Refused,
    RemoteLease,
    Return,
    ToBorrower,
    ToPageServer,
    read_by_borrower,
)
from banyan.transport.sealed.secret import Keys

PROBE_BYTES = (64 << 10, 1 << 20, 16 << 20, MAX_PROBE_BYTES)
NUM_PROBES = 3
NUM_QUESTIONS = 20
CONNECT_S, LET_IN_S, ANSWER_S, SLOW_S = 3.0, 6.0, 2.0, 60.0
MOST_S = 20.0
"""No larger probe is begun after so long."""

_SEGMENT_BYTES_AT, _SEGMENTS_IN_AT, _EARLY_SEGMENTS_AT = 20, 152, 224
"""Of Linux's ``struct tcp_info``: ``tcpi_rcv_mss``, ``tcpi_data_segs_in``, ``tcpi_rcv_ooopack``."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Probes of so many bytes took so long, by median, from the connection's first packet on."""

    num_bytes: int
    took_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.took_s


@dataclass(frozen=True, slots=True)
class Path:
    """What was found. ``obstacle``: why nothing was answered, ``bytes_obstacle``: why no bytes came; empty where they
    did. Of ``num_segments`` packets with bytes ``num_early`` came before one that belongs in front of them."""

    address: Address
    obstacle: str = ""
    answers_s: tuple[float, ...] = ()
    rates: tuple[Rate, ...] = ()
    bytes_obstacle: str = ""
    num_segments: int = 0
    num_early: int = 0
    segment_bytes: int = 0
    link_mbit: int = 0
    """Of this node's card on the path; 0: not known."""

    @property
    def answer_s(self) -> float:
        return statistics.median(self.answers_s)


def try_path(address: Address, keys: Keys) -> Path:
    """Ask, and let bytes come."""
    probe = _Probing(address, keys)
    try:
        return probe.run()
    finally:
        probe.close()


def _why_not_let_in(address: Address) -> str:
    """Whether anything listens there, whoever it is. Asked last: a page server takes who only knocks for a stranger."""
    try:
        socket.create_connection((address.host, address.port), timeout=CONNECT_S).close()
    except TimeoutError:
        return f"port {address.port} does not answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return f"port {address.port}: {error.strerror or error}"
    return "what listens there is no page server of this build"


class _Scratch:
    """Where the bytes of a probe go."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(MAX_PROBE_BYTES))
        self.num_bytes = 0

    def layer(self, layer: int, /) -> list[memoryview]:
        return [self._memory[: self.num_bytes]]


class _Probing:
    """One connection to a page server."""

    def __init__(self, address: Address, keys: Keys) -> None:
        self._address, self._host = address, address.host
        self._is_let_in = self._is_rejected = False
        self._number = self._link_mbit = 0
        self._segments: list[tuple[int, int, int]] = []
        self._scratch = _Scratch()
        self._carrier = TcpCarrier(carried=self._look, slow_s=SLOW_S)
        self._connections = NodeConnections([address], keys, connected=self._let_in, rejected=self._reject)

    def close(self) -> None:
        self._connections.hang_up()
        self._connections.close()

    def run(self) -> Path:
        found = Path(self._address)
        if not self._wait(lambda: self._is_let_in or self._is_rejected, LET_IN_S):
            return replace(found, obstacle=_why_not_let_in(self._address))
        if not self._is_let_in:
            return replace(found, obstacle="it does not let this node in")
        answers_s = tuple(took_s for _ in range(NUM_QUESTIONS) if (took_s := self._question_s()) is not None)
        if len(answers_s) < NUM_QUESTIONS:
            lost = f"{NUM_QUESTIONS - len(answers_s)} of {NUM_QUESTIONS} questions were not answered"
            return replace(found, obstacle=f"{lost} within {ANSWER_S:.0f} s", answers_s=answers_s)
        rates, obstacle = self._rates()
        num_segments, num_early = (sum(column) for column in list(zip(*self._segments, strict=True))[:2] or [(), ()])
        segment_bytes = max((size for *_, size in self._segments), default=0)
        return replace(
            found,
            answers_s=answers_s,
            rates=tuple(rates),
            bytes_obstacle=obstacle,
            num_segments=num_segments,
            num_early=num_early,
            segment_bytes=segment_bytes,
            link_mbit=self._link_mbit,
        )

    def _rates(self) -> tuple[list[Rate], str]:
        """By size, and why there are no more."""
        rates: list[Rate] = []
        began_s = time.monotonic()
        for num_bytes in PROBE_BYTES:
            took_s = []
            for _ in range(NUM_PROBES):
                if time.monotonic() - began_s > MOST_S:
                    return rates, ""
                try:
                    took_s.append(self._bytes_s(num_bytes))
                except OSError as error:
                    return rates, str(error)
            rates.append(Rate(num_bytes, statistics.median(took_s)))
        return rates, ""

    def _question_s(self) -> float | None:
        """How long an answer took, whatever it was."""
        began_s = time.perf_counter()
        answer = self._asked(lambda number: Ask(number, secrets.token_bytes(NAMESPACE_BYTES), b""))
        return None if answer is None else time.perf_counter() - began_s

    def _bytes_s(self, num_bytes: int) -> float:
        """
        Raises:
            OSError: when they do not come.
        """
        lent = self._lent(num_bytes)
        if isinstance(lent, Refused):
            raise OSError(f"it refuses: {lent.reason}")
        if not isinstance(lent, RemoteLease):
            raise OSError("it lends no bytes to try the path with: an older build?")
        self._scratch.num_bytes = num_bytes
        source = Address(self._host, lent.port)
        began_s = time.perf_counter()
        try:
            for _layer in self._carrier.pull(source, lent.token, self._scratch, 1):
                took_s = time.perf_counter() - began_s
        except TimeoutError as error:
            raise OSError(f"port {lent.port} does not answer, or stands still") from error
        except OSError as error:
            raise OSError(f"port {lent.port}: {error.strerror or error}") from error
        finally:
            self._connections.send(0, Return(lent.token))
        return took_s

    def _lent(self, num_bytes: int) -> ToBorrower | None:
        """What a page server says to a probe; one who has just been tried is asked again in a moment."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            said = self._asked(lambda number: Probe(number, num_bytes))
            is_too_soon = isinstance(said, Refused) and said.reason == TOO_MANY
            if not is_too_soon or time.monotonic() > deadline_s:
                return said
            time.sleep(1 / PROBES_PER_S)

    def _asked(self, message: Callable[[int], ToPageServer]) -> ToBorrower | None:
        """The answer to a message, if it comes in time."""
        self._number += 1
        if not self._connections.send(0, message(self._number)):
            return None
        answers: list[ToBorrower] = []
        self._wait(lambda: bool(answers), ANSWER_S, answers.append)
        return answers[0] if answers else None

    def _wait(
        self, is_over: Callable[[], bool], most_s: float, heard: Callable[[ToBorrower], None] = lambda said: None
    ) -> bool:
        """Whether it was over in time; ``heard`` is told the answer to the last message."""
        deadline_s = time.monotonic() + most_s
        while not is_over():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            for message in self._connections.wait(max(1, int(1000 * left_s))):
                with suppress(Foreign):
                    said = read_by_borrower(message.payload)
                    self._host = message.host
                    if said.number == self._number:
                        heard(said)
        return True

    def _let_in(self, node: int) -> None:
        self._is_let_in = True

    def _reject(self, node: int) -> None:
        self._is_rejected = True

    def _look(self, connection: socket.socket) -> None:
        self._segments.append(segments(connection))
        self._link_mbit = link_mbit(connection.getsockname()[0])


def segments(connection: socket.socket) -> tuple[int, int, int]:
    """Of a connection that has received: packets with bytes, those that came early, and the bytes of a whole one; zeros
    where the kernel does not say."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(told) < _EARLY_SEGMENTS_AT + 4:
        return 0, 0, 0
    num_in, num_early, size = (
        struct.unpack_from("I", told, at)[0] for at in (_SEGMENTS_IN_AT, _EARLY_SEGMENTS_AT, _SEGMENT_BYTES_AT)
    )
    return num_in, num_early, size


def link_mbit(own_host: str) -> int:
    """The speed of the card that has this IPv4 address, as Linux knows it; 0 where it does not."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError, ValueError):
                told = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == own_host:
                    with open(f"/sys/class/net/{name}/speed") as file:
                        return max(0, int(file.read()))
    return 0


_SIOCGIFADDR = 0x8915
