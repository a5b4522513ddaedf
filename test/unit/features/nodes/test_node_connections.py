# SPDX-License-Identifier: Apache-2.0
"""Connections to page servers; what is said over them is tested with real page servers in ``test_nodes``."""

import threading
import time

import pytest
from test.unit.features.nodes.rig import KEYS, free_address

from banyan.features.nodes.node_connections import NodeConnections
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
