# SPDX-License-Identifier: Apache-2.0
"""What connections of one limit have under way, as the kernel counts it."""

import contextlib
import fcntl
import socket
import struct
import threading
import time

import pytest

from banyan.features.nodes import in_flight_limit as module
from banyan.features.nodes.in_flight_limit import (
    BULK,
    LEAST_PACKETS,
    PACED_BYTES_PER_S,
    SO_MAX_PACING_RATE,
    InFlightLimit,
)

SIOCOUTQ = 0x5411
PACKET_BYTES = 64 << 10
"""The largest that a kernel makes."""


ETHERNET_BYTES = 1448


@pytest.fixture
def connect():
    """Makes connections whose reader takes nothing."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # A loopback's own packets are of 64 KiB.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, ETHERNET_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def make():
            here = stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
            here.setblocking(False)
            return here

        yield make


def fill(connection):
    """Send until the kernel takes no more; what is not acknowledged."""
    with contextlib.suppress(BlockingIOError):
        while True:
            connection.send(b"x" * (1 << 20))
    return struct.unpack("i", fcntl.ioctl(connection, SIOCOUTQ, b"\0" * 4))[0]


def test_connection_when_its_reader_takes_nothing_then_no_more_than_the_bound_is_under_way(connect):
    under_way = []
    for most_bytes in (64 << 10, 256 << 10):
        connection = connect()
        with InFlightLimit(most_bytes).joined(connection):
            under_way.append(fill(connection))
        assert most_bytes // 4 < under_way[-1] <= most_bytes + PACKET_BYTES
    assert under_way[0] < under_way[1]


def test_connections_when_several_send_then_all_of_them_together_keep_to_the_bound(connect):
    in_flight_limit, most_bytes = InFlightLimit(256 << 10), 256 << 10
    with contextlib.ExitStack() as stack:
        connections = [connect() for _ in range(4)]
        for connection in connections:
            stack.enter_context(in_flight_limit.joined(connection))
        under_way = [fill(connection) for connection in connections]
        assert sum(under_way) <= most_bytes + 4 * PACKET_BYTES
        assert max(under_way) < 2 * min(under_way) + PACKET_BYTES


def test_parts_when_a_connection_leaves_then_the_others_have_its_part(connect):
    in_flight_limit, one, other = InFlightLimit(128 << 10), connect(), connect()

    def part_bytes(connection):
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    with in_flight_limit.joined(one):
        alone = part_bytes(one)
        with in_flight_limit.joined(other):
            assert part_bytes(one) == part_bytes(other) == alone // 2
        assert part_bytes(one) == alone == 128 << 10


def test_part_when_the_kernel_gives_less_then_it_is_said_once_and_what_to_raise(connect, caplog):
    module._say_cut.cache_clear()
    with open("/proc/sys/net/core/wmem_max") as file:
        most_bytes = 8 * int(file.read())
    for _ in range(2):
        with InFlightLimit(most_bytes).joined(connect()):
            pass
    assert caplog.text.count("net.core.wmem_max") == 1


def test_part_when_many_send_then_each_still_has_some_packets(connect):
    in_flight_limit = InFlightLimit(16 << 10)
    with contextlib.ExitStack() as stack:
        connections = [connect() for _ in range(16)]
        for connection in connections:
            stack.enter_context(in_flight_limit.joined(connection))
        packet_bytes = connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        assert packet_bytes <= ETHERNET_BYTES
        part_bytes = connections[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert part_bytes >= LEAST_PACKETS * packet_bytes - 1 and part_bytes > 1 << 10


def test_remote_lease_when_packets_are_as_large_as_the_bound_then_it_is_not_held_up(connect):
    """As on a loopback, where one packet is 64 KiB."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as here:
        here.connect(listener.getsockname())
        there, _ = listener.accept()
        with there, InFlightLimit(32 << 10).joined(here):
            reader = threading.Thread(target=take, args=(there, 128 << 20))
            start_s = time.monotonic()
            reader.start()
            here.sendall(bytes(128 << 20))
            reader.join()
            # Waiting up to 40 ms for each acknowledgement takes 40 seconds and more.
            assert time.monotonic() - start_s < 15


def take(connection, num_bytes):
    while num_bytes:
        num_bytes -= len(connection.recv(num_bytes))


def test_connection_when_it_sends_then_it_is_paced_and_stands_behind_other_traffic(connect):
    connection = connect()
    with InFlightLimit(64 << 10).joined(connection):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == BULK
        rate = connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
        assert int.from_bytes(rate, "little") == PACED_BYTES_PER_S


def control_of(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_connection_when_the_system_has_chosen_another_control_then_remote_leases_travel_without_timers(connect):
    connection = connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    with InFlightLimit(64 << 10).joined(connection):
        assert control_of(connection) == b"cubic"


def test_connection_when_the_kernel_has_no_such_control_then_it_keeps_its_own(connect, monkeypatch):
    monkeypatch.setattr(module, "CONGESTION_CONTROL", b"none-such")
    connection = connect()
    before = control_of(connection)
    with InFlightLimit(64 << 10).joined(connection):
        assert control_of(connection) == before
