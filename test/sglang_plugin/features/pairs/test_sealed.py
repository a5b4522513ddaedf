# SPDX-License-Identifier: Apache-2.0
"""SGLang's own functions that make and connect control sockets, with a secret and without."""

import contextlib
import socket as sockets
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver
from test.unit.features.nodes.rig import until

from banyan.features.pairs.rank import by_nixl, hand_over, sealed
from banyan.sglang_plugin import runtime
from banyan.transport.sealed import sealing


@pytest.fixture
def secret(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(b"the secret of this pair")
    path.chmod(0o600)
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=str(path)))
    hand_over.receiver_class.cache_clear()
    yield path
    hand_over.receiver_class.cache_clear()


KEPT = []
"""Contexts whose gates run on, as a server's do: one that is collected would wait for them."""


@pytest.fixture
def context():
    KEPT.append(zmq.Context())
    return KEPT[-1]


def control_port(context):
    """As SGLang's manager makes it."""
    with sealed.guarding_what_listens():
        return conn.get_zmq_socket_on_host(context, zmq.PULL, host="127.0.0.1")


def test_control_port_when_there_is_a_secret_then_receivers_of_the_same_are_heard_and_others_are_not(
    secret, context, caplog
):
    port, socket = control_port(context)
    address = f"tcp://127.0.0.1:{port}"
    with zmq.Context() as plain, plain.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send_multipart([b"a stranger"])
        until(lambda: sealed.NOT_LET_IN in caplog.text)
        receiver = hand_over.receiver_class(by_nixl.NixlReceiver)
        ours, _ = receiver._connect(address)
        ours.send_multipart([b"a decode server"])
        assert socket.poll(5000) and socket.recv_multipart() == [b"a decode server"]
        assert not socket.poll(0)
    receiver.close_all_sockets()


def test_receivers_when_there_is_a_secret_then_their_class_is_made_once_and_sglang_closes_their_sockets(
    secret, context
):
    receiver = hand_over.receiver_class(by_nixl.NixlReceiver)
    assert receiver is hand_over.receiver_class(by_nixl.NixlReceiver) and issubclass(receiver, NixlKVReceiver)
    port, _ = control_port(context)
    ours, _ = receiver._connect(f"tcp://127.0.0.1:{port}")
    # As its manager does, when a prefill server has gone.
    conn.CommonKVReceiver.disconnect_endpoint(f"tcp://127.0.0.1:{port}")
    assert ours.closed
    assert receiver._ctx.get(zmq.MAX_SOCKETS) == NixlKVReceiver._ctx.get(zmq.MAX_SOCKETS)


def test_sockets_when_there_is_no_secret_then_they_are_as_sglang_makes_them(monkeypatch, context):
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=""))
    hand_over.receiver_class.cache_clear()
    _, socket = control_port(context)
    assert not sealing.is_sealed(socket)
    assert hand_over.receiver_class(by_nixl.NixlReceiver) is by_nixl.NixlReceiver
    hand_over.receiver_class.cache_clear()


def test_manager_when_it_was_made_then_sglangs_function_is_as_before(secret, context):
    before = conn.get_zmq_socket_on_host
    control_port(context)
    assert conn.get_zmq_socket_on_host is before


READY = b"\x04\x1a" + b"\x05READY" + b"\x0bSocket-Type" + (4).to_bytes(4, "big") + b"PUSH"


def greeting(mechanism):
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def long_frame(flags):
    return bytes([flags]) + (200 << 20).to_bytes(8, "big")


@pytest.mark.parametrize(
    ("is_sealed", "said"),
    [
        (False, greeting(b"NULL") + long_frame(6)),
        (False, greeting(b"NULL") + READY + long_frame(2)),
        (True, greeting(b"CURVE") + long_frame(6)),
    ],
    ids=["in the handshake", "as a message", "in the handshake of CURVE"],
)
def test_control_port_when_a_stranger_announces_more_bytes_than_any_message_has_then_it_is_cut_off(
    request, monkeypatch, context, is_sealed, said
):
    if is_sealed:
        request.getfixturevalue("secret")
    else:
        monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=""))
    port, _ = control_port(context)
    # It is told the listener's half of the handshake, and then the connection ends.
    with (
        contextlib.suppress(ConnectionResetError),
        sockets.create_connection(("127.0.0.1", port), timeout=3) as stranger,
    ):
        stranger.sendall(said)
        while stranger.recv(4096):
            pass


def test_control_port_when_nobody_reads_it_then_no_more_messages_are_taken_in_than_may_wait(monkeypatch, context):
    monkeypatch.setattr(runtime, "config", lambda: SimpleNamespace(secret_file=""))
    port, socket = control_port(context)
    assert socket.getsockopt(zmq.RCVHWM) == sealed.MOST_QUEUED
    with zmq.Context() as there, there.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.SNDHWM, 1)
        sender.setsockopt(zmq.SNDTIMEO, 500)
        sender.connect(f"tcp://127.0.0.1:{port}")
        with pytest.raises(zmq.Again):
            for _ in range(4 * sealed.MOST_QUEUED):
                sender.send(bytes(1 << 20))


def test_secret_when_others_may_read_it_then_the_server_is_refused(secret, context, monkeypatch):
    secret.chmod(0o644)
    said = []

    def refuse(line):
        said.append(line)
        raise SystemExit(1)

    monkeypatch.setattr(runtime, "refuse", refuse)
    with pytest.raises(SystemExit):
        control_port(context)
    assert "chmod 600" in said[0]
