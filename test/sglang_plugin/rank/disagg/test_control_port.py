# SPDX-License-Identifier: Apache-2.0
"""A prefill server's control socket under messages that no decode server sends: SGLang's own thread behind a real
socket, with Banyan's screen before it and without."""

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import GUARD, NixlKVManager
from test.sglang_plugin.rank.disagg.hand_over_rig import AGENT, SlowAgent, make_manager

from banyan.sglang_plugin.rank import report
from banyan.sglang_plugin.rank.disagg.control_port import is_foreign
from banyan.telemetry import Counters

# SGLang's thread ends by an exception, here at the test's end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

NUM_FOREIGN = 1000


def asking(room):
    """As ``NixlKVManager.build_receiver_metadata_message``."""
    pages = np.arange(3, dtype=np.int32).tobytes()
    return [GUARD, b"%d" % room, b"10.0.0.2", b"4242", AGENT.encode(), pages, b"0", b"1", b"", b"0", b"0"]


def foreign(rng):
    kinds = (
        [rng.randbytes(rng.randrange(1, 200))],
        [b"GET / HTTP/1.1", b"Host: here"],
        [b""],
        [GUARD],
        [GUARD, b"seven"],
        [GUARD, b"None", b"too", b"short"],
        [GUARD, *(rng.randbytes(8) for _ in range(12))],
        asking(9)[: rng.randrange(1, 8)],
        [*asking(9)[:5], b"odd", *asking(9)[6:]],
        [b"WATERMARK", b"1"],
    )
    return rng.choice(kinds)


class Ending:
    """A socket whose reader ends with the test: SGLang's thread is no daemon."""

    def __init__(self, socket):
        self._socket = socket
        self.has_ended = threading.Event()

    def recv_multipart(self):
        while not self._socket.poll(50):
            if self.has_ended.is_set():
                raise SystemExit
        return self._socket.recv_multipart()


@pytest.fixture
def port():
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    ending = Ending(pull)
    yield SimpleNamespace(socket=ending, send=push.send_multipart)
    ending.has_ended.set()
    time.sleep(0.1)
    context.destroy(linger=0)


def is_asked_within(manager, room, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while manager.request_status.get(room) != KVPoll.WaitingForInput:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def test_socket_when_a_thousand_foreign_messages_come_then_the_next_decode_server_is_heard(port, monkeypatch):
    counters = Counters()
    linker = SimpleNamespace(counters=counters)
    monkeypatch.setattr(report, "_linker", lambda: linker)
    manager = make_manager(SlowAgent(1))
    manager.server_socket = port.socket
    manager._start_bootstrap_thread()
    rng = random.Random(5)
    for number in range(NUM_FOREIGN):
        port.send(foreign(rng))
        if number % 100 == 0:
            port.send(asking(number + 10))
            assert is_asked_within(manager, number + 10, 10)
    port.send(asking(7))
    assert is_asked_within(manager, 7, 10)
    assert counters.foreign_hand_over_messages == NUM_FOREIGN
    assert 9 not in manager.request_status


def test_socket_when_it_is_sglangs_alone_then_one_foreign_message_ends_it(port):
    """When this fails, SGLang has learnt it, and the screen can go."""
    manager = make_manager(SlowAgent(1))
    manager.server_socket = port.socket
    NixlKVManager._start_bootstrap_thread(manager)
    port.send(asking(6))
    assert is_asked_within(manager, 6, 10)
    port.send([b"GET / HTTP/1.1"])
    port.send(asking(7))
    assert not is_asked_within(manager, 7, 0.5)


def test_peer_when_its_pool_does_not_fit_then_it_is_not_taken_in_and_the_thread_goes_on(monkeypatch):
    manager = make_manager(SlowAgent(1))
    misfit = SimpleNamespace(agent_name="misfit", endpoint="10.0.0.3")

    def refuse(self, peer):
        self.decode_kv_args_table[peer.agent_name] = peer
        raise ValueError("fewer regions")

    monkeypatch.setattr(NixlKVManager, "_add_remote_peer", refuse)
    manager._add_remote_peer(misfit)
    assert "misfit" not in manager.decode_kv_args_table


@pytest.mark.parametrize(("stages", "foreign"), [(True, False), (False, True)])
def test_message_when_it_is_of_staging_then_it_is_foreign_only_where_staging_is_off(stages, foreign):
    assert is_foreign([b"WATERMARK", b"1"], stages=stages) is foreign
