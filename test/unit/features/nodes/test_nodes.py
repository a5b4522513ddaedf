# SPDX-License-Identifier: Apache-2.0
"""A prefix goes from one node to another, over real sockets and the real native core."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq
from test.unit.cache_rig import request
from test.unit.directory.rig import NAMESPACE, frames, keys
from test.unit.features.nodes.rig import KEYS, NUM_LAYERS, Node, free_address, until, whole
from zmq.auth.thread import ThreadAuthenticator

from banyan.arena.page_source import Wanted
from banyan.core import Address, Run, SourceKind
from banyan.features.nodes import borrower, node_connections, page_server, questions
from banyan.features.nodes.carriers import NUM_FAILED
from banyan.features.nodes.exported_arena import LeasedFrames
from banyan.features.nodes.node_connections import NodeMessage
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.pull import NodeFound
from banyan.features.nodes.questions import Best
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import PLACE_BYTES, Answer, Ask, Reading, Refused, encode, pack_keys, read_by_borrower
from banyan.transport.sealed.secret import Keys

LENT = [3, 4, 5]


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    one, two = Node(), Node()
    yield one, two
    two.close()
    one.close()


def connect(one: Node, two: Node, **more) -> None:
    two.borrow_from(one.lend(), **more)
    until(lambda: two.borrower.num_listening == 1)


def test_answer_when_its_pages_have_come_meanwhile_then_nothing_is_read(nodes) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    two.remote.ask(Wanted("r", keys(1, 2, 3), 0, whole))
    two.keep([1, 2, 3], LENT)
    two.wait_answered("r")
    assert two.counters.question_hits == 1
    assert (two.counters.pulls, two.residency.num_filling) == (0, 0)


def test_prefix_when_another_node_holds_it_then_it_comes_from_there_with_the_same_bytes(nodes) -> None:
    one, two = nodes
    pages = one.keep([1, 2, 3], LENT)
    connect(one, two)
    two.remote.ask(Wanted("r", keys(1, 2, 3, 4), 0, whole))
    assert two.remote.is_awaited("r")
    two.wait_answered("r")
    offer = two.cache.prepare(request("r"), keys(1, 2, 3, 4))
    assert offer.runs == (Run(SourceKind.REMOTE, 3, str(one.page_server.address)),)
    assert two.cache.admit("r", keys(1, 2, 3), frames(9, 1, 7)).runs == offer.runs
    assert two.cache.finish(two.cache.start())
    assert [two.rank.pages(frame) for frame in (9, 1, 7)] == pages
    until(lambda: two.poll() or two.residency.num_resident == 3)
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 0)
    assert two.cache.prepare(request("again"), keys(1, 2, 3)).runs == (Run(SourceKind.HOST, 3),)
    counters = two.counters
    assert (counters.questions, counters.question_hits, counters.pulls, counters.pull_pages) == (1, 1, 1, 3)
    assert counters.pull_bytes == 3 * 3 * 4096
    until(lambda: one.page_server.sent_bytes == counters.pull_bytes)


def test_prefix_when_this_node_holds_its_beginning_then_only_the_rest_is_pulled(nodes) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    two.remote.ask(Wanted("r", keys(2, 3), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_resident == 2)
    assert two.residency.frame(*keys(1)) is None


def test_question_when_nobody_has_a_page_then_nothing_is_pulled(nodes) -> None:
    one, two = nodes
    connect(one, two)
    two.remote.ask(Wanted("r", keys(1, 2), 0, whole))
    two.wait_answered("r")
    assert (two.counters.questions, two.counters.question_hits, two.counters.pulls) == (1, 0, 0)


def test_question_when_no_node_is_there_then_the_request_is_not_held_back(nodes) -> None:
    _, two = nodes
    two.borrow_from(free_address())
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    assert not two.remote.is_awaited("r") and two.counters.questions == 0


def test_node_when_it_stands_still_then_one_request_waits_and_the_next_does_not(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two)
    with one.page_server.lending._lock:
        two.remote.ask(Wanted("first", keys(1), 0, whole))
        two.wait_answered("first")
        assert two.borrower.num_listening == 0
        two.remote.ask(Wanted("second", keys(1), 0, whole))
        assert not two.remote.is_awaited("second")
    until(lambda: two.borrower.num_listening == 1)


def test_node_when_it_says_that_it_reads_and_was_not_to_then_it_stands_still_all_the_same(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two)
    with one.page_server.lending._lock:
        two.remote.ask(Wanted("r", keys(1), 0, whole))

        def is_over():
            for number in range(8):
                two.borrower._take(NodeMessage(0, encode(Reading(number)), "there"))
            two.poll()
            return not two.remote.is_awaited("r")

        until(is_over)
        assert two.borrower.num_listening == 0


def test_node_when_it_starts_again_then_it_is_asked_as_soon_as_it_is_reached(nodes) -> None:
    one, two = nodes
    connect(one, two)
    one.page_server.close()
    two.remote.ask(Wanted("r", keys(1, 2), 0, whole))
    two.wait_answered("r")
    assert two.borrower.num_listening == 0
    # Nobody asks by himself any more.
    two.borrower._asking._nodes[0].probe_at_s = math.inf
    one.lend(address=one.page_server.address)
    until(lambda: two.borrower.num_listening == 1)


def test_pages_when_they_leave_between_answer_and_remote_lease_then_the_read_fails_and_frames_are_free(nodes) -> None:
    one, two = nodes
    one.keep([1, 2], LENT[:2])
    connect(one, two)
    number = two.borrower.ask(keys(1, 2))
    answers = []
    until(lambda: answers.extend(two.borrower.answers()) or answers)
    one.residency.reset()
    ((_, found),) = answers
    two.prefetch.start_pull(keys(1, 2), whole, found, two.borrower.read, found.origin)
    assert two.prefetch.num_arriving(keys(1, 2)) == 2
    until(lambda: two.poll() or two.residency.num_filling == 0)
    assert number and two.counters.pull_failed_pages == 2 and two.residency.num_resident == 0
    assert one.page_server.lending.num_refused == 1


def test_prefix_when_it_is_longer_than_may_be_lent_then_only_so_much_is_promised_and_comes(nodes) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    two.borrow_from(one.lend(max_pages=2))
    until(lambda: two.borrower.num_listening == 1)
    two.remote.ask(Wanted("r", keys(1, 2, 3), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_filling == 0)
    assert two.counters.pull_failed_pages == 0 and two.residency.num_resident == 2
    assert one.page_server.lending.num_refused == 0


def test_checksums_when_they_take_long_then_others_are_answered_and_a_withdrawal_waits_for_one_layer(
    nodes, monkeypatch
) -> None:
    def slow(leased_frames, namespace, keys):
        for _ in range(100):
            time.sleep(0.1)
            yield [0] * len(keys)

    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    monkeypatch.setattr(LeasedFrames, "sums", slow)
    monkeypatch.setattr(borrower, "PATIENCE_S", 10)
    found = NodeFound(str(one.page_server.address), 0, keys(1, 2))
    read = two.borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes]))
    until(lambda: one.page_server.lending._num_borrowing == 1)
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    assert two.counters.question_hits == 1 and two.borrower.num_listening == 1
    one.page_server.withdraw()
    assert one.page_server.lending.remote_leases.num_to_lend == 100
    one.residency.reset()
    one.frame_table.drain()
    assert one.frame_table.num_quarantined == 0
    until(lambda: read.has_ended)
    one.page_server.lending.lend(one.exported())


def test_lending_when_a_thread_that_sums_ends_by_a_fault_then_nothing_is_lent_any_more(nodes, monkeypatch) -> None:
    def fails(leased_frames, namespace, keys):
        raise RuntimeError("a fault of the checksums")

    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    monkeypatch.setattr(LeasedFrames, "sums", fails)
    found = NodeFound(str(one.page_server.address), 0, keys(1, 2))
    read = two.borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes]))
    until(lambda: read.has_ended and not one.page_server.lending.lends(NAMESPACE))
    assert one.page_server.lending.remote_leases.num_to_lend == 100
    one.page_server.lending.lend(SimpleNamespace(namespace=NAMESPACE))
    assert not one.page_server.lending.lends(NAMESPACE), "an update of weights lends from it again"


def test_lending_when_the_thread_that_awaits_readers_ends_by_a_fault_then_an_update_of_weights_lends_nothing(
    nodes, monkeypatch
) -> None:
    one, _ = nodes
    one.lend()
    monkeypatch.setattr(one.page_server._source._callers, "_give_up", lambda: 1 // 0)
    until(lambda: not one.page_server.lending.lends(NAMESPACE))
    one.page_server.lending.lend(SimpleNamespace(namespace=NAMESPACE))
    assert not one.page_server.lending.lends(NAMESPACE)


def test_node_when_it_has_a_name_then_bytes_come_from_where_the_answer_came_from(nodes, monkeypatch) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    address = one.lend()
    two.borrow_from(Address("localhost", address.port))
    until(lambda: two.borrower.num_listening == 1)
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real(_no_name(host), *rest, **more))
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_resident == 1)


def _no_name(host: str) -> str:
    assert host != "localhost", "a name server may not answer"
    return host


def test_node_when_it_is_not_known_to_have_an_address_of_ipv4_then_its_bytes_come_from_there_all_the_same(
    nodes, monkeypatch
) -> None:
    """As a name that nobody knew at the start."""
    one, two = nodes
    one.keep([1], LENT[:1])
    monkeypatch.setattr(node_connections, "_is_of_ipv6", lambda host: True)
    connect(one, two)
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_resident == 1)


def test_message_when_it_is_larger_than_any_question_then_its_connection_ends_and_is_made_again(
    nodes, monkeypatch
) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two)
    connected = []
    monkeypatch.setattr(two.borrower._connections, "_connected", connected.append)
    two.borrower._tell(lambda: two.borrower._connections._sockets[0].send(bytes(1 << 20)))
    until(lambda: connected)
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    assert one.page_server.num_foreign == 0 and two.counters.question_hits == 1


def test_page_server_when_it_withdraws_then_frames_are_free_and_nothing_is_found(nodes) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    one.page_server.lending.remote_leases.lend(one.page_server.lending._exported.lease(keys(1, 2, 3))[0], None)
    one.residency.reset()
    assert one.frame_table.num_quarantined == 3
    one.page_server.withdraw()
    one.frame_table.drain()
    assert one.frame_table.num_quarantined == 0 and one.page_server.lending.remote_leases.num_pages == 0
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    assert two.counters.question_hits == 0
    one.page_server.lending.lend(one.exported())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_page_server_when_whoever_lets_nodes_in_ends_by_a_fault_then_nothing_is_lent_and_it_can_be_closed(
    nodes, monkeypatch
) -> None:
    async def fails(gate, message):
        raise RuntimeError("a fault of the authenticator's")

    one, two = nodes
    one.keep([1, 2, 3], LENT)
    monkeypatch.setattr(ThreadAuthenticator, "handle_zap_message", fails)
    two.borrow_from(one.lend())
    one.page_server.lending.remote_leases.lend(one.page_server.lending._exported.lease(keys(1, 2, 3))[0], None)
    until(lambda: not one.page_server._thread.is_alive())
    # The nodes are closed behind the test, as ever.
    assert one.page_server.lending.remote_leases.num_pages == 0


def test_secret_when_it_is_wrong_then_one_line_on_each_side_and_no_answer(nodes, caplog) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    caplog.set_level(logging.WARNING, logger="banyan")
    two.borrow_from(one.lend(), keys=Keys.of(b"the secret of others"))
    until(lambda: any("does not know" in line for line in caplog.messages))
    until(lambda: one.page_server is not None and two.borrower.num_listening == 0)
    context = zmq.Context()
    for _ in range(20):
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(one.page_server.address.endpoint)
            stranger.send(b"hello")
    context.term()
    assert two.borrower.ask(keys(1)) is None
    for text in ("does not know the secret", "compare the files of --banyan-secret-file"):
        assert sum(text in line for line in caplog.messages) == 1


def friend_of(page_server: PageServer, context: zmq.Context) -> zmq.Socket:
    """The socket of one who knows the secret."""
    friend = context.socket(zmq.DEALER)
    friend.setsockopt(zmq.CURVE_SERVERKEY, KEYS.page_server.public)
    friend.setsockopt(zmq.CURVE_PUBLICKEY, KEYS.borrower.public)
    friend.setsockopt(zmq.CURVE_SECRETKEY, KEYS.borrower.secret)
    friend.connect(page_server.address.endpoint)
    return friend


def test_page_server_when_it_is_asked_more_than_it_listens_to_then_the_rest_is_refused(nodes, monkeypatch) -> None:
    one, _ = nodes
    monkeypatch.setattr(page_server, "MESSAGES_PER_S", 3)
    # Its clock stands still.
    one.page_server = PageServer(free_address(), KEYS, max_pages=1, num_layers=NUM_LAYERS, clock=lambda: 0.0)
    one.page_server.lending.lend(one.exported())
    context = zmq.Context()
    friend = friend_of(one.page_server, context)
    answers = []
    for number in range(5):
        friend.send(encode(Ask(number, NAMESPACE, pack_keys(keys(1)))))
        assert friend.poll(5000)
        answers.append(read_by_borrower(friend.recv()))
    context.destroy(linger=0)
    refused = [Refused(number, "too many messages") for number in (3, 4)]
    assert answers == [*(Answer(number, 0) for number in range(3)), *refused]


def test_page_server_when_a_thousand_foreign_messages_come_then_it_answers_the_next_question(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two)
    context = zmq.Context()
    friend = friend_of(one.page_server, context)
    for number in range(1000):
        friend.send([b"", b"garbage", encode(Ask(number, b"short", b"")), b"\xc1" * 5000][number % 4])
    until(lambda: one.page_server.num_foreign == 1000)
    for port in (one.page_server.address.port, one.page_server.address.port + 1):
        for _ in range(5):
            with socket.create_connection((one.page_server.address.host, port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    friend.send(encode(Ask(7, NAMESPACE, pack_keys(keys(1)))))
    assert friend.poll(5000)
    context.destroy(linger=0)
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    two.wait_answered("r")
    assert two.counters.question_hits == 1


def test_question_when_it_is_for_one_node_then_no_other_is_asked(nodes) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    other = Node()
    other.keep([1, 2, 3, 4], [1, 2, 3, 4])
    page_servers = [other.lend(), one.lend()]
    two.borrow_from(*page_servers)
    until(lambda: two.borrower.num_listening == 2)
    two.remote._told = lambda request: [str(page_servers[1])]
    two.remote.ask(Wanted("r", keys(1, 2, 3, 4), 0, whole))
    two.wait_answered("r")
    offer = two.cache.prepare(request("r"), keys(1, 2, 3, 4))
    assert offer.runs == (Run(SourceKind.REMOTE, 3, str(page_servers[1])),), "the other one has more"
    until(lambda: two.poll() or two.residency.num_resident == 3)
    assert two.borrower.knows(str(page_servers[0])) and not two.borrower.knows("stranger:1")
    assert two.borrower.ask_at(["stranger:1"], keys(1)) is None
    other.close()


def test_borrower_when_its_thread_ends_by_a_fault_then_its_reads_end_and_nobody_waits_for_answers(
    nodes, monkeypatch, caplog
) -> None:
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    borrower = two.borrower
    found = NodeFound(str(one.page_server.address), 0, keys(1, 2))
    monkeypatch.setattr(borrower._connections, "wait", lambda timeout_ms: [NodeMessage(0, b"", "there")])
    monkeypatch.setattr(borrower, "_take", lambda message: 1 // 0)
    number = borrower.ask(keys(1, 2, 3))
    reads = [borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes]))]
    borrower._thread.join(5)
    reads.append(borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes])))
    until(lambda: all(read.has_ended for read in reads))
    assert borrower.num_listening == 0 and borrower.ask(keys(1)) is None
    assert number is None or borrower.answers() == [(number, None)]
    # Found by the thread in its last moment, behind the look of the scheduler's.
    borrower._answers.append(Best(number or 1, 0, 3))
    assert borrower.answers() == [(number or 1, None)]
    assert "banyan-borrow" in caplog.text and "ZeroDivisionError" in caplog.text
    for _ in range(3):
        borrower._tell(lambda: None)
    assert borrower._commands.qsize() <= 3


def test_borrower_when_nodes_send_what_no_page_server_sends_then_it_is_said_once_of_each_and_counted(
    nodes, caplog
) -> None:
    _, two = nodes
    caplog.set_level(logging.WARNING, logger="banyan")
    two.borrow_from(free_address(), free_address())
    for node in (0, 1, 0, 0, 1):
        two.borrower._take(NodeMessage(node, b"garbage", "there"))
    assert two.borrower.num_foreign == 5
    assert sum("what no page server sends" in line for line in caplog.messages) == 2


def test_borrower_when_the_system_has_no_thread_left_then_that_read_ends_and_the_next_one_is_served(
    nodes, monkeypatch
) -> None:
    def start(thread):
        if thread.name.startswith("banyan-pull"):
            raise RuntimeError("can't start new thread")
        started(thread)

    one, two = nodes
    one.keep([1, 2, 3], LENT)
    connect(one, two)
    found = NodeFound(str(one.page_server.address), 0, keys(1, 2))
    started = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        read = two.borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes]))
        until(lambda: read.has_ended)
    assert {reason for _, reason in read.finish()} == {"gone"}
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 0)
    read = two.borrower.read(found, 2, two.memory, array("q", [0, two.block.frame_bytes]))
    until(lambda: read.has_ended)
    assert not {reason for _, reason in read.finish()} & {"gone"}
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 0)
    assert two.borrower._num_pulls == [0], "each counts once"


class Faulty:
    """A carrier with a fault of its own."""

    def pull(self, source, token, target, num_layers, *, is_wanted):
        raise ZeroDivisionError
        yield


def test_pull_when_its_carrier_has_a_fault_then_its_pages_are_given_back_at_once(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two, carrier=Faulty())
    found = NodeFound(str(one.page_server.address), 0, keys(1))
    read = two.borrower.read(found, 1, two.memory, array("q", [0]))
    until(lambda: read.has_ended)
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 0)


class Mute:
    """NIXL of both ends: it is up, and brings nothing."""

    backend, is_ready, num_lent = "UCX", True, 0

    def lend(self, memories) -> None: ...
    def withdraw(self) -> None: ...
    def close(self) -> None: ...

    def readable(self, leased_frames) -> tuple[bytes, bytes]:
        return b"an agent", bytes(PLACE_BYTES)

    def carrier(self, lease) -> Mute:
        return self

    def pull(self, *args, **named):
        raise TimeoutError("no byte")
        yield


def test_pages_when_nixl_brings_none_of_a_node_then_they_come_over_tcp(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    two.borrow_from(one.lend(by_nixl=Mute()), by_nixl=[Mute()])
    until(lambda: two.borrower.num_listening == 1)
    found = NodeFound(str(one.page_server.address), 0, keys(1))
    is_lost = []
    for _ in range(NUM_FAILED + 1):
        read = two.borrower.read(found, 1, two.memory, array("q", [0]))
        until(lambda read=read: read.has_ended)
        is_lost.append(bool(read.finish()))
        until(lambda: two.borrower.num_lost == sum(is_lost))
    assert is_lost == [True] * NUM_FAILED + [False]


def test_node_when_it_answers_and_its_bytes_do_not_come_then_no_probe_brings_it_back(nodes) -> None:
    one, two = nodes
    one.keep([1], LENT[:1])
    connect(one, two, carrier=Mute())
    found = NodeFound(str(one.page_server.address), 0, keys(1))
    for number in range(1, NUM_FAILED + 1):
        until(lambda: two.borrower.num_listening == 1)
        read = two.borrower.read(found, 1, two.memory, array("q", [0]))
        until(lambda read=read, number=number: read.has_ended and two.borrower.num_lost == number)
    until(lambda: not two.borrower._asking._nodes[0].is_silent)
    two.remote.ask(Wanted("r", keys(1), 0, whole))
    assert two.borrower.num_listening == 0 and not two.remote.is_awaited("r")


class Standing:
    """A carrier whose source says nothing, until the test lets it go or nobody wants it."""

    def __init__(self) -> None:
        self.num_pulls = 0
        self.is_lost = threading.Event()

    def pull(self, source, token, target, num_layers, *, is_wanted):
        self.num_pulls += 1
        until(lambda: self.is_lost.is_set() or not is_wanted())
        raise TimeoutError("no byte")
        yield


class StandingAt(Standing):
    """As ``Standing``, of the source at one port; others bring what they have."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def pull(self, source, *what, is_wanted):
        pull = super().pull if source.port == self._port else TcpCarrier().pull
        yield from pull(source, *what, is_wanted=is_wanted)


@pytest.fixture
def short_turn(monkeypatch) -> None:
    monkeypatch.setattr(borrower, "TURN_S", 0.2)


@pytest.fixture
def standing(nodes) -> tuple[Node, Standing]:
    """A node that pulls three pages, each by itself, of one that has lent them and says nothing."""
    one, two = nodes
    one.keep([1, 2, 3], LENT)
    carrier = Standing()
    connect(one, two, carrier=carrier)
    for number in (1, 2, 3):
        found = NodeFound(str(one.page_server.address), 0, keys(number))
        two.prefetch.start_pull(keys(number), whole, found, two.borrower.read, found.origin)
    until(lambda: carrier.num_pulls == 2 and two.borrower._workers[0]._work.qsize() == 1)
    return two, carrier


def test_flush_when_pulls_stand_still_then_nobody_waits_for_them_and_no_frame_is_left(standing) -> None:
    two, _ = standing
    two.remote.forget()
    two.prefetch.quiesce()
    assert two.prefetch.num_left_behind == 0 and two.residency.num_filling == 0
    assert two.borrower.num_listening == 1 and two.borrower.num_lost == 0, "the node is not to blame"


def test_pull_when_others_of_its_node_are_slow_then_it_waits_no_longer_than_a_forward_may(
    nodes, short_turn, standing
) -> None:
    one, _ = nodes
    two, carrier = standing
    until(lambda: two.poll() or two.residency.num_filling == 2)
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 2)
    carrier.is_lost.set()
    until(lambda: two.poll() or two.residency.num_filling == 0)
    assert carrier.num_pulls == 2


def test_close_when_a_pull_waits_for_its_turn_then_it_ends_and_its_pages_are_given_back(nodes, standing) -> None:
    one, _ = nodes
    two, carrier = standing
    closing = threading.Thread(target=two.borrower.close)
    closing.start()
    # Nothing but what tells both threads to end.
    until(lambda: two.borrower._workers[0]._work.qsize() == 2)
    carrier.is_lost.set()
    until(lambda: two.poll() or two.residency.num_filling == 0)
    closing.join()
    until(lambda: one.page_server.lending.remote_leases.num_remote_leases == 0)
    assert carrier.num_pulls == 2


def test_pull_when_another_node_is_slow_then_it_does_not_wait_for_it(nodes, monkeypatch) -> None:
    monkeypatch.setattr(borrower, "PATIENCE_S", 10)
    slow, two = nodes
    quick = Node()
    for node in (slow, quick):
        node.keep([1, 2, 3], LENT)
        node.lend()
    carrier = StandingAt(slow.page_server._source.port)
    two.borrow_from(slow.page_server.address, quick.page_server.address, carrier=carrier)
    until(lambda: two.borrower.num_listening == 2)
    for place, node, number in ((0, slow, 1), (0, slow, 2), (1, quick, 3)):
        found = NodeFound(str(node.page_server.address), place, keys(number))
        two.prefetch.start_pull(keys(number), whole, found, two.borrower.read, found.origin)
    until(lambda: two.poll() or (two.residency.num_resident == 1 and carrier.num_pulls == 2))
    assert two.residency.num_filling == 2
    carrier.is_lost.set()
    until(lambda: two.poll() or two.residency.num_filling == 0)
    quick.close()


def test_pages_when_two_nodes_have_them_then_they_come_from_the_one_with_fewer_pulls_under_way(
    nodes, monkeypatch
) -> None:
    monkeypatch.setattr(borrower, "PATIENCE_S", 10)
    first, two = nodes
    last = Node()
    for node in (first, last):
        node.keep([1, 2, 3], LENT)
        node.lend()
    carrier = StandingAt(last.page_server._source.port)
    two.borrow_from(first.page_server.address, last.page_server.address, carrier=carrier)
    until(lambda: two.borrower.num_listening == 2)
    for number, node in ((1, last), (2, first)):
        two.remote.ask(Wanted(f"r{number}", keys(number), 0, whole))
        two.wait_answered(f"r{number}")
        until(lambda node=node: node.page_server.lending.num_pages == 1)
    until(lambda: two.poll() or two.residency.num_resident == 1)
    carrier.is_lost.set()
    until(lambda: two.poll() or two.residency.num_filling == 0)
    until(lambda: two.borrower._num_pulls == [0, 0])
    last.close()


def test_pages_when_another_node_than_the_one_with_the_most_is_chosen_then_they_come_from_there(nodes) -> None:
    long, two = nodes
    short = Node()
    for node, numbers in ((long, [1, 2, 3]), (short, [1, 2])):
        node.keep(numbers, LENT[: len(numbers)])
        node.lend()
    two.borrow_from(long.page_server.address, short.page_server.address)
    two.remote._choose = lambda request, num_missing, found: [run.num_pages for run in found].index(2)
    until(lambda: two.borrower.num_listening == 2)
    two.remote.ask(Wanted("r", keys(1, 2, 3), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_resident == 2)
    assert (long.page_server.lending.num_pages, short.page_server.lending.num_pages) == (0, 2)
    short.close()


def test_pages_when_the_node_with_the_most_refuses_to_lend_then_the_next_come_from_another(nodes, monkeypatch) -> None:
    monkeypatch.setattr(questions, "FIRST_BEHIND_S", 60)
    refusing, two = nodes
    short = Node()
    for node, numbers in ((refusing, [1, 2, 3]), (short, [1, 2])):
        node.keep(numbers, LENT[: len(numbers)])
        node.lend()
    lending = refusing.page_server.lending
    monkeypatch.setattr(lending, "_lend", lambda message, *_: Refused(message.number, "gone"))
    two.borrow_from(refusing.page_server.address, short.page_server.address)
    until(lambda: two.borrower.num_listening == 2)
    for number in range(2):
        two.remote.ask(Wanted(f"r{number}", keys(1, 2, 3), 0, whole))
        two.wait_answered(f"r{number}")
        until(lambda: two.poll() or two.residency.num_filling == 0)
    assert (lending.num_refused, two.residency.num_resident) == (1, 2)
    monkeypatch.undo()
    two.remote.ask(Wanted("r", keys(3), 0, whole))
    two.wait_answered("r")
    until(lambda: two.poll() or two.residency.num_resident == 3)
    until(lambda: not two.borrower._asking._behind)
    short.close()


def test_pulls_when_their_node_was_lost_since_it_lent_for_them_then_they_do_not_wait_for_it_again(standing) -> None:
    two, carrier = standing
    carrier.is_lost.set()
    until(lambda: two.poll() or two.residency.num_filling == 0)
    until(lambda: two.borrower.num_lost == 2)
    assert carrier.num_pulls == 2 and two.counters.pull_failed_pages == 3
