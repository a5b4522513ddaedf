# SPDX-License-Identifier: Apache-2.0
"""Strangers at a lender's port, and what the port survives."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import ExitStack

import pytest
from test.unit.features.nodes.rig import KEYS, free_address, until

from banyan.core import Address
from banyan.features.nodes import callers as module
from banyan.features.nodes import tcp
from banyan.features.nodes.callers import Callers
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.wire import TOKEN_BYTES
from banyan.telemetry import start_thread

TOKEN = b"t" * TOKEN_BYTES


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "20010db800010002"),
        ("fe80::1%eth0", "fe80000000000000"),
    ],
)
def test_origin_when_it_is_an_address_of_ipv6_that_stands_for_one_of_ipv4_then_it_is_that_one(address, origin):
    assert module._origin(address) == origin


class Port:
    """Callers at a port of their own; ``tokens`` have come."""

    def __init__(self, listener=None):
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.tokens = []
        self.callers = Callers(self.listener, self._came)
        self.thread = start_thread(self.callers.run, name="test-callers", feature="a test")

    def _came(self, connection, token):
        self.tokens.append(token)
        connection.sendall(b"!")
        connection.close()

    def call(self, origin="127.0.0.1"):
        return socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(origin, 0))

    def answers(self, origin="127.0.0.1"):
        """Whether somebody who shows a token at once is heard."""
        with self.call(origin) as connection:
            try:
                connection.sendall(TOKEN)
                return connection.recv(1) == b"!"
            except ConnectionError:
                return False

    def close(self):
        self.callers.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.listener.close()


@pytest.fixture
def port():
    made = Port()
    yield made
    made.close()


class _OutOfFiles(socket.socket):
    num_left = 3
    error = errno.EMFILE

    def accept(self):
        if self.num_left:
            self.num_left -= 1
            raise OSError(self.error, "not now")
        return super().accept()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.EPERM])
def test_port_when_accepting_fails_for_a_while_then_the_next_borrower_is_heard_and_one_line_says_so(error, caplog):
    listener = _OutOfFiles(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    listener.error = error
    port = Port(listener)
    try:
        assert port.answers()
        assert port.callers.num_faults == 3
        assert len([line for line in caplog.messages if "could not be accepted" in line]) == 1
    finally:
        port.close()


def test_caller_when_its_token_drips_in_then_it_has_no_more_time_than_another(port, monkeypatch):
    monkeypatch.setattr(module, "TOKEN_S", 0.3)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    with port.call() as connection, pytest.raises(ConnectionError):
        # A byte in each half of its time: all of them would take eight times as long.
        for _ in range(TOKEN_BYTES):
            connection.sendall(b"t")
            time.sleep(0.15)
    assert port.tokens == []


def test_callers_when_strangers_of_one_address_hold_all_that_they_may_then_others_are_heard(port, monkeypatch):
    monkeypatch.setattr(module, "MAX_PER_ORIGIN", 2)
    monkeypatch.setattr(module, "TOKEN_S", 60.0)
    with ExitStack() as stack:
        held = [stack.enter_context(port.call()) for _ in range(2)]
        until(lambda: len(port.callers._callers) == 2)
        assert not port.answers()
        assert port.answers("127.0.0.2")
        held[0].close()
        until(lambda: len(port.callers._callers) == 1)
        assert port.answers()


def test_callers_when_there_are_too_many_of_all_then_the_next_is_closed_and_none_has_a_thread(port, monkeypatch):
    monkeypatch.setattr(module, "MAX_CALLERS", 3)
    monkeypatch.setattr(module, "TOKEN_S", 60.0)
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(port.call(f"127.0.0.{number + 2}"))
        until(lambda: len(port.callers._callers) == 3)
        assert not port.answers()
    until(lambda: not port.callers._callers)
    assert port.answers() and port.callers._num_of == {}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%lo", "fe80::2%eth0", True),
    ],
)
def test_origin_when_addresses_are_compared_then_a_network_of_ipv6_is_one(one, other, is_same):
    assert (module._origin(one) == module._origin(other)) is is_same


def source(**more):
    return tcp.TcpSource(Address("127.0.0.1", 0), RemoteLeases(max_pages=9, clock=time.monotonic), num_layers=1, **more)


def test_stranger_when_his_token_is_of_no_remote_lease_then_he_has_no_thread_and_no_slot(monkeypatch):
    lender = source()
    monkeypatch.setattr(tcp, "start_thread", lambda *args, **named: pytest.fail("a thread for a stranger"))
    try:
        with socket.create_connection(("127.0.0.1", lender.port), timeout=5) as connection:
            connection.sendall(TOKEN)
            assert connection.recv(1) == b""
        assert lender._room._value == tcp.MAX_CONNECTIONS
    finally:
        lender.close()


class _Lease:
    num_pages = 1

    def release(self):
        pass


class _LeasedFrames:
    def layer(self, layer):
        return [memoryview(b"a page")]


def test_remote_lease_when_no_thread_can_be_started_then_its_connection_is_closed_and_the_next_one_is_served(
    monkeypatch,
):
    lender = source()
    token = lender._remote_leases.lend(_Lease(), _LeasedFrames()).token

    def refuse(*args, **named):
        raise RuntimeError("can't start new thread")

    def pulled():
        with socket.create_connection(("127.0.0.1", lender.port), timeout=5) as connection:
            connection.sendall(token)
            return connection.recv(100)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(tcp, "start_thread", refuse)
            assert pulled() == b""
        assert lender._room._value == tcp.MAX_CONNECTIONS
        assert pulled() == b"a page"
    finally:
        lender.close()


def fail(*args, **named):
    raise ZeroDivisionError


def test_lending_when_the_port_behind_the_page_server_ends_by_a_fault_then_nothing_is_lent_any_more(monkeypatch):
    monkeypatch.setattr(Callers, "_give_up", fail)
    page_server = PageServer(free_address(), KEYS, max_pages=1, num_layers=1)
    try:
        withdrawn = page_server.lending
        withdrawn.lend(type("Exported", (), {"namespace": b"n"})())
        page_server._source._thread.join(5)
        until(lambda: not withdrawn.lends(b"n"))
    finally:
        page_server.close()


def test_lending_when_the_page_servers_thread_ends_by_a_fault_then_nothing_is_lent_any_more(monkeypatch):
    page_server = PageServer(free_address(), KEYS, max_pages=1, num_layers=1)
    try:
        page_server.lending.lend(type("Exported", (), {"namespace": b"n"})())
        monkeypatch.setattr(page_server.lending.remote_leases, "expire", fail)
        page_server._thread.join(5)
        assert not page_server._thread.is_alive() and not page_server.lending.lends(b"n")
    finally:
        page_server.close()
