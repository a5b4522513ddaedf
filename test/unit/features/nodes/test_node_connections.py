# SPDX-License-Identifier: Apache-2.0
"""Connections to page servers; what is said over them is tested with real page servers in ``test_nodes``."""

import contextlib
import select
import socket
import threading
import time

import pytest
import zmq
from test.unit.features.nodes.rig import KEYS, free_address, until

from banyan.core import Address
from banyan.features.nodes import node_connections
from banyan.features.nodes.node_connections import NodeConnections
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.wire import Ask

LONG_MS = 30_000


@pytest.fixture
def connections():
    made = NodeConnections([free_address(), free_address()], KEYS, connected=lambda node: None)
    yield made
    made.hang_up()
    made.close()


def test_wait_when_it_is_woken_then_it_ends_without_a_message_and_the_next_one_waits_again(connections):
    waking = threading.Timer(0.02, connections.wake)
    waking.start()
    start = time.monotonic()
    assert connections.wait(LONG_MS) == []
    waking.join()
    assert time.monotonic() - start < LONG_MS / 1000
    assert connections.wait(1) == []


def test_send_when_nobody_listens_there_then_it_says_so_and_does_not_wait(connections):
    assert not connections.send(1, Ask(1, b"n" * 32, b""))


def test_connections_when_nobody_takes_what_nodes_send_then_few_messages_of_each_wait(connections):
    assert {socket.getsockopt(zmq.RCVHWM) for socket in connections._sockets} == {node_connections.MOST_QUEUED}


def test_name_when_it_has_addresses_of_ipv6_alone_then_those_are_tried_and_else_those_of_ipv4(monkeypatch):
    def look_up(host, port, family):
        assert family == socket.AF_INET
        if host == "six.test":
            raise socket.gaierror(socket.EAI_NONAME, "no address of that family")

    monkeypatch.setattr(node_connections, "getaddrinfo", look_up)
    made = NodeConnections([Address("six.test", 1), Address("both.test", 1)], KEYS, connected=lambda node: None)
    assert [socket.getsockopt(zmq.IPV6) for socket in made._sockets] == [1, 0]
    made.hang_up()
    made.close()


class Mute(threading.Thread):
    """A path to ``target`` that one day carries nothing more, and tells nobody. As a firewall that forgets a flow."""

    def __init__(self, target):
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._target = target
        self._pairs = {}
        self.is_mute = False
        self.num_came = 0
        self.has_ended = False
        self.start()

    def run(self):
        self._listener.settimeout(0.01)
        while not self.has_ended:
            with contextlib.suppress(TimeoutError):
                here = self._listener.accept()[0]
                there = socket.create_connection((self._target.host, self._target.port))
                self._pairs |= {here: there, there: here}
                self.num_came += 1
                self.is_mute = False
            if self.is_mute:
                continue
            for one in select.select(list(self._pairs), [], [], 0)[0]:
                with contextlib.suppress(OSError):
                    self._pairs[one].sendall(one.recv(65536))
        for one in (*self._pairs, self._listener):
            one.close()


def test_connection_when_its_path_goes_mute_then_it_is_made_anew(monkeypatch):
    monkeypatch.setattr("banyan.transport.lost_peers.HEARTBEAT_MS", 1000)
    monkeypatch.setattr("banyan.transport.lost_peers.SILENCE_MS", 3000)
    page_server = PageServer(free_address(), KEYS, max_pages=1, num_layers=1)
    path = Mute(page_server.address)
    connected = []
    made = NodeConnections([path.address], KEYS, connected=connected.append)
    try:
        until(lambda: made.wait(10) or connected)
        until_s = time.monotonic() + 5
        until(lambda: made.wait(10) or time.monotonic() > until_s)
        assert connected == [0], "one that is idle is kept"
        path.is_mute = True
        until(lambda: made.wait(10) or len(connected) == 2, timeout_s=30)
        assert path.num_came == 2
    finally:
        made.hang_up()
        made.close()
        path.has_ended = True
        path.join()
        page_server.close()
