# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive whole and late, and a broken connection breaks on the other side, too."""

import socket
import threading
import time

import pytest

from benchmark.servers import free_port
from benchmark.slow_path import CHUNK_BYTES, Alarm, SlowPath

HERE, THERE = "127.0.0.2", "127.0.0.1"


@pytest.fixture
def far():
    """Somebody who sends back what it is sent, up to one connection."""
    with socket.create_server((THERE, free_port())) as server:
        held = {}

        def serve():
            held["connection"] = server.accept()[0]
            while chunk := held["connection"].recv(CHUNK_BYTES):
                held["connection"].sendall(chunk)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], held


def test_bytes_when_the_rate_is_bounded_then_they_arrive_whole_and_take_their_time(far):
    port, _ = far
    sent = bytes(range(256)) * 1024
    with SlowPath(HERE, THERE, [port], rate=1e6), socket.create_connection((HERE, port)) as near:
        started_s = time.monotonic()
        near.sendall(sent)
        found = b""
        while len(found) < len(sent):
            found += near.recv(CHUNK_BYTES)
    assert found == sent
    # Both ways at once, but the last piece waits for nothing.
    assert time.monotonic() - started_s >= (len(sent) - CHUNK_BYTES) / 1e6


def test_connection_when_the_far_end_breaks_it_then_it_ends_here(far):
    port, held = far
    with SlowPath(HERE, THERE, [port], rate=1e9), socket.create_connection((HERE, port)) as near:
        near.sendall(b"x")
        assert near.recv(1) == b"x"
        held["connection"].shutdown(socket.SHUT_RDWR)
        near.settimeout(10)
        assert near.recv(1) == b""


def test_connection_when_nobody_listens_there_then_it_ends_at_once():
    port = free_port()
    with SlowPath(HERE, THERE, [port], rate=1e9), socket.create_connection((HERE, port)) as near:
        near.settimeout(10)
        assert near.recv(1) == b""


def test_alarm_when_so_many_bytes_have_come_back_then_it_rings_once_and_not_before(far):
    port, _ = far
    rung = threading.Event()
    with SlowPath(HERE, THERE, [port], rate=1e9) as path, socket.create_connection((HERE, port)) as near:
        alarm = path.at(1000, rung.set)
        near.sendall(bytes(999))
        while path.num_bytes < 999:
            time.sleep(0.001)
        assert not rung.is_set()
        near.sendall(bytes(2))
        assert rung.wait(10) and alarm.settle()


def test_alarm_when_it_is_called_off_then_it_does_not_ring_and_what_its_action_raises_is_told():
    rung = []
    off = Alarm(10, lambda: rung.append(True))
    assert not off.settle()
    off.came(100)
    assert rung == []

    def fail():
        raise OSError("nobody to kill")

    failed = Alarm(10, fail)
    failed.came(10)
    with pytest.raises(OSError, match="nobody to kill"):
        failed.settle()
