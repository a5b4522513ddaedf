# SPDX-License-Identifier: Apache-2.0
"""The packets of a loan carry the traffic class that was asked for, in both directions."""

import socket
import threading
import time

import pytest

from banyan.core import Address
from banyan.nodes import tcp
from banyan.nodes.loans import Loans
from banyan.nodes.wire import TOKEN_BYTES


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


def test_loan_when_a_class_is_asked_for_then_both_ends_mark_their_packets(monkeypatch):
    marked = []
    monkeypatch.setattr(tcp, "mark", lambda connection, dscp: marked.append((connection.getsockname()[1], dscp)))
    source = tcp.TcpSource(Address("127.0.0.1", 0), Loans(max_pages=1, clock=time.monotonic), num_layers=1, dscp=8)
    try:
        layers = tcp.TcpCarrier(8).pull(Address("127.0.0.1", source.port), b"x" * TOKEN_BYTES, Nothing(), 1)
        with pytest.raises(ConnectionError):
            next(layers)
    finally:
        source.close()
    assert {dscp for _, dscp in marked} == {8}
    assert len({port for port, _ in marked}) == 2 and source.port in dict(marked)


class Nothing:
    def layer(self, layer):
        return [memoryview(bytearray(1))]


def test_connection_when_nothing_passes_then_the_call_ends_with_an_error_after_the_stall(monkeypatch):
    monkeypatch.setattr(tcp, "STALL_S", 0.25)
    here, there = socket.socketpair()
    with here, there:
        tcp.wait_in_kernel(here)
        start_s = time.monotonic()
        with pytest.raises(OSError):
            here.recvmsg_into([bytearray(8)], 0, socket.MSG_WAITALL)
        assert 0.2 < time.monotonic() - start_s < 2.0


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
