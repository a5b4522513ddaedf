# SPDX-License-Identifier: Apache-2.0
"""The dispatcher waits for messages on a server with the engine, unless Banyan's loop does."""

import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.managers.io_struct import sock_recv

from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan_cpu_engine import patient_socket, server
from banyan_cpu_engine.patient_socket import PatientSocket


@pytest.fixture
def pair():
    context = zmq.Context()
    here, there = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = here.bind_to_random_port("tcp://127.0.0.1")
    there.connect(f"tcp://127.0.0.1:{port}")
    yield here, there
    context.destroy(linger=0)


def test_look_when_nothing_comes_then_it_has_waited_before_it_says_so(pair):
    started_s = time.monotonic()
    with pytest.raises(zmq.Again):
        sock_recv(PatientSocket(pair[0]), flags=zmq.NOBLOCK)
    assert time.monotonic() - started_s >= patient_socket.POLL_MS / 1e3 * 0.9


def test_look_when_something_comes_meanwhile_then_it_is_handed_over_at_once(pair, monkeypatch):
    here, there = pair
    monkeypatch.setattr(patient_socket, "POLL_MS", 60_000)
    sender = threading.Timer(0.05, there.send_pyobj, [["a request"]])
    sender.start()
    assert PatientSocket(here).recv_pyobj(flags=zmq.NOBLOCK) == ["a request"]
    sender.join()


@pytest.mark.parametrize(
    ("has_engine", "banyans", "places", "waits"),
    [
        (True, None, True, True),
        (True, Config(), True, False),
        (True, Config(), False, True),
        (False, None, True, False),
    ],
)
def test_dispatcher_when_its_loop_starts_then_it_waits_where_nobody_else_does(
    has_engine, banyans, places, waits, monkeypatch
):
    monkeypatch.setattr(server, "is_on", lambda: has_engine)
    monkeypatch.setattr(runtime, "config", lambda: banyans)
    monkeypatch.setattr(runtime, "_features_off", set() if places else {"placement"})
    controller = SimpleNamespace(recv_from_tokenizer=SimpleNamespace(name="SGLang's"))
    patient_socket.before_event_loop(controller)
    assert isinstance(controller.recv_from_tokenizer, PatientSocket) is waits
    assert controller.recv_from_tokenizer.name == "SGLang's"
