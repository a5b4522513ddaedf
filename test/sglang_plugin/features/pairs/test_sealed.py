# SPDX-License-Identifier: Apache-2.0
"""SGLang's own functions that make and connect control sockets, with a secret and without."""

from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

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
    with sealed.sealing_what_listens():
        return conn.get_zmq_socket_on_host(context, zmq.PULL, host="127.0.0.1")


def test_control_port_when_there_is_a_secret_then_receivers_of_the_same_are_heard_and_others_are_not(secret, context):
    port, socket = control_port(context)
    address = f"tcp://127.0.0.1:{port}"
    with zmq.Context() as plain, plain.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address)
        stranger.send_multipart([b"a stranger"])
        receiver = hand_over.receiver_class(by_nixl.NixlReceiver)
        ours, _ = receiver._connect(address)
        ours.send_multipart([b"a decode server"])
        assert socket.poll(5000) and socket.recv_multipart() == [b"a decode server"]
        assert not socket.poll(300)
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
