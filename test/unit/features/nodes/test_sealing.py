# SPDX-License-Identifier: Apache-2.0
"""Two programs' contexts in one: one listens, the other connects, with keys of one secret or of two."""

import logging

import pytest
import zmq
from test.unit.features.nodes.rig import KEYS, until

from banyan.transport.sealed import sealing
from banyan.transport.sealed.secret import Keys

OTHERS = Keys.of(b"another secret, of others")
LATE_MS = 300


KEPT = []
"""Contexts whose gates run on, as a server's do: one that is collected would wait for them."""


@pytest.fixture
def contexts():
    made = [zmq.Context(), zmq.Context()]
    KEPT.extend(made)
    return made


def listener(context, keys=KEYS, line="a stranger came"):
    with sealing.listening(context, keys):
        socket = context.socket(zmq.PULL)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    sealing.watch(socket, line)
    return socket, f"tcp://127.0.0.1:{port}"


def speaker(context, address, keys=KEYS):
    if keys is not None:
        sealing.speaks(context, keys)
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    return socket


def test_message_when_both_know_the_secret_then_it_comes_and_travels_by_curve(contexts):
    here, there = contexts
    socket, address = listener(here)
    other = speaker(there, address)
    other.send_multipart([b"room", b"7"])
    assert socket.poll(5000) and socket.recv_multipart() == [b"room", b"7"]
    assert sealing.is_sealed(socket) and sealing.is_sealed(other)


@pytest.mark.parametrize("keys", [OTHERS, None])
def test_message_when_its_sender_knows_another_secret_or_none_then_it_never_comes_and_one_line_says_so(
    contexts, caplog, keys
):
    here, there = contexts
    socket, address = listener(here)
    for _ in range(3):
        speaker(there, address, keys).send_multipart([b"room", b"7"])
    with caplog.at_level(logging.WARNING, logger="banyan"):
        until(lambda: "a stranger came" in caplog.text)
        assert not socket.poll(LATE_MS)
    assert caplog.text.count("a stranger came") == 1


def test_listener_when_it_has_listened_then_what_its_context_connects_later_speaks_to_other_listeners(contexts):
    here, there = contexts
    _, _ = listener(here)
    theirs, address = listener(there)
    speaker(here, address).send(b"status")
    assert theirs.poll(5000) and theirs.recv() == b"status"


def test_speaker_when_the_listener_has_no_secret_then_nothing_is_said_to_it_and_one_line_says_so(contexts, caplog):
    here, _ = contexts
    plain = here.socket(zmq.PULL)
    address = f"tcp://127.0.0.1:{plain.bind_to_random_port('tcp://127.0.0.1')}"
    context = sealing.SealedContext(KEYS, "it does not know the secret")
    with caplog.at_level(logging.WARNING, logger="banyan"):
        socket = context.socket(zmq.PUSH)
        socket.connect(address)
        socket.send(b"where my pool lies")
        until(lambda: "it does not know the secret" in caplog.text)
    assert not plain.poll(LATE_MS)
    socket.close(linger=0)
    context.term()
