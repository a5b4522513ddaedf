# SPDX-License-Identifier: Apache-2.0
"""Connections to page servers; what is said over them is tested with real page servers in ``test_nodes``."""

import threading
import time

import pytest
from test.unit.features.nodes.rig import KEYS, free_address

from banyan.features.nodes.lines import Lines
from banyan.features.nodes.wire import Ask

LONG_MS = 30_000


@pytest.fixture
def lines():
    made = Lines([free_address(), free_address()], KEYS, connected=lambda node: None)
    yield made
    made.hang_up()
    made.close()


def test_wait_when_it_is_woken_then_it_ends_without_a_message_and_the_next_one_waits_again(lines):
    ringing = threading.Timer(0.02, lines.wake)
    ringing.start()
    start = time.monotonic()
    assert lines.wait(LONG_MS) == []
    ringing.join()
    assert time.monotonic() - start < LONG_MS / 1000
    assert lines.wait(1) == []


def test_send_when_nobody_listens_there_then_it_says_so_and_does_not_wait(lines):
    assert not lines.send(1, Ask(1, b"n" * 32, b""))
