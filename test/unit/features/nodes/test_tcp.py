# SPDX-License-Identifier: Apache-2.0
"""The packets of a remote lease carry the traffic class that was asked for, in both directions."""

import contextlib
import math
import socket
import struct
import threading
import time

import pytest
from test.unit.features.nodes.rig import until

from banyan.core import Address
from banyan.features.nodes import tcp
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.wire import TOKEN_BYTES


@pytest.mark.parametrize(
    ("family", "host", "level", "option"),
    [
        (socket.AF_INET, "127.0.0.1", socket.IPPROTO_IP, socket.IP_TOS),
        (socket.AF_INET6, "::1", socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    ],
)
def test_socket_when_it_is_marked_then_its_upper_six_bits_are_the_dscp(family, host, level, option):
    with socket.socket(family) as made:
        tcp.mark(made, None)
        assert made.getsockopt(level, option) == 0
        tcp.mark(made, 8)
        assert made.getsockopt(level, option) == 8 << 2


def test_remote_lease_when_a_class_is_asked_for_then_both_ends_mark_their_packets(monkeypatch):
    marked = []
    monkeypatch.setattr(tcp, "mark", lambda connection, dscp: marked.append((connection.getsockname()[1], dscp)))
    source = tcp.TcpSource(
        Address("127.0.0.1", 0), RemoteLeases(max_pages=1, clock=time.monotonic), num_layers=1, dscp=8
    )
    try:
        layers = tcp.TcpCarrier(8).pull(Address("127.0.0.1", source.port), b"x" * TOKEN_BYTES, Nothing(), 1)
        with pytest.raises(ConnectionError):
            next(layers)
    finally:
        source.close()
    assert {dscp for _, dscp in marked} == {8}
    assert len({port for port, _ in marked}) == 2 and source.port in dict(marked)


class Pages:
    """What is lent: more than a kernel buffers."""

    num_pages = 1

    def layer(self, layer):
        return [memoryview(bytes(64 << 20))]

    def release(self):
        pass


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_source_when_it_listens_at_all_addresses_of_ipv6_then_those_of_ipv4_are_served_as_well():
    source = tcp.TcpSource(Address("::", 0), RemoteLeases(max_pages=1, clock=time.monotonic), num_layers=1)
    try:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, source.port), timeout=1).close()
    finally:
        source.close()


def test_remote_lease_when_its_reader_has_gone_then_its_room_is_free_at_once():
    remote_leases = RemoteLeases(max_pages=1, clock=time.monotonic)
    source = tcp.TcpSource(Address("127.0.0.1", 0), remote_leases, num_layers=1)
    try:
        token = remote_leases.lend(Pages(), Pages()).token
        with socket.create_connection(("127.0.0.1", source.port), timeout=5) as reader:
            reader.sendall(token)
            reader.recv(1)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: remote_leases.num_pages == 0)
        assert source.sent_bytes == 0, "it has not been sent"
    finally:
        source.close()


class Nothing:
    def layer(self, layer):
        return [memoryview(bytearray(1))]


@pytest.fixture
def source_socket():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


class Layer:
    def __init__(self, num_bytes):
        self.bytes = bytearray(num_bytes)

    def layer(self, layer):
        return [memoryview(self.bytes)]


def test_pull_when_its_source_falls_silent_in_mid_layer_then_it_ends_after_one_stall_and_not_two(
    monkeypatch, source_socket
):
    """The call that has got a part of the layer returns late; the silence began before."""
    monkeypatch.setattr(tcp, "STALL_S", 1.0)
    monkeypatch.setattr(tcp, "LOOK_S", 0.1)
    layers = tcp.TcpCarrier().pull(Address(*source_socket.getsockname()), b"x" * TOKEN_BYTES, Layer(64), 1)
    ended_s = []

    def pull():
        with pytest.raises(OSError):
            next(layers)
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=pull)
    thread.start()
    connection, _ = source_socket.accept()
    with connection:
        silent_s = time.monotonic()
        connection.sendall(b"a part")
        thread.join()
    assert 0.9 < ended_s[0] - silent_s < 1.6


def test_pull_when_bytes_come_seldom_but_come_then_it_is_whole(monkeypatch, source_socket):
    monkeypatch.setattr(tcp, "STALL_S", 0.5)
    monkeypatch.setattr(tcp, "LOOK_S", 0.05)
    target = Layer(4)

    def say():
        connection, _ = source_socket.accept()
        with connection:
            for number in range(4):
                time.sleep(0.2)
                connection.sendall(bytes([number]))

    thread = threading.Thread(target=say)
    thread.start()
    source = Address(*source_socket.getsockname())
    assert list(tcp.TcpCarrier().pull(source, b"x" * TOKEN_BYTES, target, 1)) == [0]
    thread.join()
    assert target.bytes == bytes([0, 1, 2, 3])


def test_pull_when_bytes_come_steadily_and_too_slowly_then_it_ends_all_the_same(monkeypatch, source_socket):
    monkeypatch.setattr(tcp, "LOOK_S", 0.05)

    def drip():
        connection, _ = source_socket.accept()
        with connection, contextlib.suppress(OSError):
            while True:
                time.sleep(0.02)
                connection.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    carrier, began_s = tcp.TcpCarrier(slow_s=0.2), time.monotonic()
    with pytest.raises(OSError, match="too slowly"):
        list(carrier.pull(Address(*source_socket.getsockname()), b"x" * TOKEN_BYTES, Layer(200), 2))
    assert time.monotonic() - began_s < 10
    thread.join()


def test_pull_when_it_is_large_and_slow_then_it_takes_no_longer_than_a_rank_may_stand(monkeypatch):
    monkeypatch.setattr(tcp, "MOST_S", 20.0)
    began_s = time.monotonic()
    pace = tcp.Pace(slow_s=10.0)
    assert 9.9 < pace.until_s(1) - began_s < 20
    assert pace.until_s(4000 << 20) - began_s < 21
    assert tcp.Pace(slow_s=60.0).until_s(1) - began_s > 59, "a person waits as long as he likes"


def test_pull_when_nobody_wants_it_any_more_then_it_ends_though_bytes_come(source_socket):
    wanted = [True]
    source = Address(*source_socket.getsockname())
    layers = tcp.TcpCarrier().pull(source, b"x" * TOKEN_BYTES, Layer(64), 1, is_wanted=lambda: wanted[0])

    def drip():
        connection, _ = source_socket.accept()
        with connection, contextlib.suppress(OSError):
            for number in range(63):
                connection.sendall(b"x")
                wanted[0] = number < 3
                time.sleep(0.01)
            time.sleep(1)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(ConnectionAbortedError):
        next(layers)
    thread.join()


def test_remote_lease_when_it_is_called_in_then_sending_ends_though_its_reader_goes_on():
    lent = [True]
    here, there = socket.socketpair()
    with here, there:
        tcp.wait_in_kernel(here)

        def drip():
            for number in range(200):
                there.recv(64)
                lent[0] = number < 3
                time.sleep(0.01)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(ConnectionAbortedError):
            tcp._send(here, [memoryview(bytearray(64 << 20))], math.inf, lambda: lent[0])
        thread.join()


def test_remote_lease_when_its_reader_stands_still_then_sending_ends_after_a_stall(monkeypatch):
    monkeypatch.setattr(tcp, "STALL_S", 0.3)
    monkeypatch.setattr(tcp, "LOOK_S", 0.1)
    here, there = socket.socketpair()
    with here, there:
        tcp.wait_in_kernel(here)
        with pytest.raises(OSError, match="no byte has passed"):
            tcp._send(here, [memoryview(bytearray(64 << 20))], math.inf)


def test_connection_when_bytes_come_in_parts_then_one_call_takes_all_of_them():
    here, there = socket.socketpair()
    with here, there:
        tcp.wait_in_kernel(here)
        target = bytearray(8)

        def say():
            for part in (b"slow", b"ly.."):
                time.sleep(0.05)
                there.sendall(part)

        thread = threading.Thread(target=say)
        thread.start()
        assert here.recvmsg_into([target], 0, socket.MSG_WAITALL)[0] == 8 and target == b"slowly.."
        thread.join()
