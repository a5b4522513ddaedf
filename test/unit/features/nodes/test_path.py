# SPDX-License-Identifier: Apache-2.0
"""What a page server's path carries, tried from the other end, and what stands in its way."""

import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest
from test.unit.features.nodes.rig import KEYS, NUM_LAYERS, free_address

from banyan.features.nodes import path as tried
from banyan.features.nodes.lending import Lending
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.path import try_path
from banyan.features.nodes.path_probe import MOST_PROBES_AT_ONCE, ProbeBytes
from banyan.features.nodes.remote_leases import TERM_S
from banyan.features.nodes.wire import (
    MAX_PROBE_BYTES,
    Foreign,
    Probe,
    Refused,
    RemoteLease,
    encode,
    read_by_page_server,
)
from banyan.transport.sealed.secret import Keys


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Probes that are over at once, and little patience."""
    monkeypatch.setattr(tried, "LET_IN_S", 1.0)
    monkeypatch.setattr(tried, "PROBE_BYTES", (1 << 16, 3 << 20))


def until(condition):
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@contextmanager
def page_server():
    address = free_address()
    with closing(PageServer(address, KEYS, max_pages=1, num_layers=NUM_LAYERS)) as server:
        yield address, server


def test_path_when_nothing_is_lent_yet_then_answers_and_rates_are_known_all_the_same():
    with page_server() as (address, server):
        found = try_path(address, KEYS)
        assert (found.obstacle, found.bytes_obstacle) == ("", "")
        assert [rate.num_bytes for rate in found.rates] == [1 << 16, 3 << 20] and 0 < found.answer_s < 1
        assert found.num_segments > 0 and found.segment_bytes > 500
        # It counts what it has sent, and who has read that may be the sooner one.
        until(lambda: server.sent_bytes >= tried.NUM_PROBES * sum(tried.PROBE_BYTES))
        until(lambda: server.lending.remote_leases.num_pages == 0)
        assert server._strangers._said_s is None, "he who tries is known"


def test_path_when_it_is_tried_again_and_again_then_each_try_waits_until_its_probes_are_lent():
    with page_server() as (address, server):
        while isinstance(server.lending.answer(Probe(1, 1), port=7), RemoteLease):
            pass
        found = try_path(address, KEYS)
        assert found.bytes_obstacle == "" and len(found.rates) == len(tried.PROBE_BYTES)


def test_path_when_the_secret_is_another_then_it_is_not_let_in():
    with page_server() as (address, _):
        assert "does not let this node in" in try_path(address, Keys.of(b"another secret of nobody")).obstacle


def test_path_when_nobody_listens_then_the_port_is_named():
    address = free_address()
    assert f"port {address.port}" in try_path(address, KEYS).obstacle


def test_path_when_somebody_else_listens_then_it_is_no_page_server():
    address = free_address()
    with socket.create_server((address.host, address.port)):
        assert "no page server" in try_path(address, KEYS).obstacle


def test_path_when_the_second_port_is_closed_then_that_one_is_named():
    with page_server() as (address, server):
        server._source.close()
        found = try_path(address, KEYS)
        assert found.obstacle == "" and f"port {address.port + 1}" in found.bytes_obstacle and not found.rates


def test_path_when_the_second_port_stands_still_then_it_ends_all_the_same(monkeypatch):
    monkeypatch.setattr("banyan.features.nodes.tcp.STALL_S", 0.3)
    with page_server() as (address, server), socket.create_server((address.host, 0)) as deaf:
        server._source.port = deaf.getsockname()[1]
        assert "stands still" in try_path(address, KEYS).bytes_obstacle


def test_probe_when_it_asks_for_too_much_then_it_is_foreign():
    for num_bytes in (0, -1, MAX_PROBE_BYTES + 1):
        with pytest.raises(Foreign):
            read_by_page_server(encode(Probe(1, num_bytes)))
    assert read_by_page_server(encode(Probe(1, MAX_PROBE_BYTES))) == Probe(1, MAX_PROBE_BYTES)


def test_probes_when_there_are_too_many_then_refused_and_what_was_lent_runs_out():
    now_s = 0.0
    lending = Lending(max_pages=1, clock=lambda: now_s)
    answers = [lending.answer(Probe(number, 1 << 20), port=7) for number in range(MOST_PROBES_AT_ONCE + 5)]
    assert [type(answer) for answer in answers] == [RemoteLease] * MOST_PROBES_AT_ONCE + [Refused] * 5
    assert lending.remote_leases.num_to_lend == 1, "they take no page's room"
    now_s = TERM_S
    assert lending.remote_leases.num_remote_leases == MOST_PROBES_AT_ONCE
    lending.remote_leases.expire()
    assert lending.remote_leases.num_remote_leases == 0


def test_probes_when_many_threads_ask_then_no_more_are_lent_than_allowed():
    lending = Lending(max_pages=1, clock=lambda: 0.0)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.extend(lending.answer(Probe(n, 1), port=7) for n in range(10)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(answer, RemoteLease) for answer in answers) == MOST_PROBES_AT_ONCE


@pytest.mark.parametrize("num_bytes", [1, 1 << 20, (3 << 20) + 5])
def test_probe_when_its_bytes_are_read_then_they_are_so_many_and_all_in_the_first_layer(num_bytes):
    views = ProbeBytes(num_bytes)
    assert sum(map(len, views.layer(0))) == num_bytes and views.layer(1) == []
