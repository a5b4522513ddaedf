# SPDX-License-Identifier: Apache-2.0
"""The control sockets of a pair: what waits there is bounded, and with ``--banyan-secret-file`` they speak CURVE.

SGLang makes them of ZeroMQ contexts of its own, without authentication. The contexts are told the keys: each socket
that listens is made by one function, which is wrapped while a manager is made; all others connect. That function takes
any number of messages of any length in, and ZeroMQ does so before it knows of whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.disaggregation.common import conn
from sglang.srt.utils.network import get_zmq_socket_on_host

from banyan.owner import read_secret
from banyan.refusals import secret_refusal
from banyan.sglang_plugin import runtime
from banyan.transport.sealed import sealing
from banyan.transport.sealed.secret import Keys

MAX_FRAME_BYTES = 16 << 20
"""The largest names the pages of a request: four million of them."""

MOST_QUEUED = 64
"""Messages of one connection, before the thread that reads them. Who sends more waits."""

NOT_LET_IN = "one who does not know the secret of --banyan-secret-file is not let in"
NOT_SPOKEN_TO = "a prefill server does not have this --banyan-secret-file: nothing is handed over from there"


def keys() -> Keys | None:
    """What the pair's sockets are sealed with; None without a secret. Refuses one that cannot be used."""
    config = runtime.config()
    if config is None or not config.secret_file:
        return None
    try:
        return Keys.of(read_secret(Path(config.secret_file)))
    except (OSError, ValueError) as error:
        runtime.refuse(secret_refusal(path=config.secret_file, error=error))


class _Bounded(zmq.Socket[bytes]):
    """What SGLang sets counts for what is bound later: it is set anew."""

    def bind_to_random_port(self, *args: Any, **named: Any) -> int:
        self.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        return super().bind_to_random_port(*args, **named)


def _listen(context: Any, socket_type: Any, host: str | None = None) -> tuple[int, Any]:
    made_of = SimpleNamespace(socket=partial(context.socket, socket_class=_Bounded))
    port, socket = get_zmq_socket_on_host(made_of, socket_type, host=host)
    return port, socket


@contextmanager
def guarding_what_listens() -> Iterator[None]:
    """What a manager that is made in here listens to is bounded; with a secret it is sealed, and so is what the manager
    connects to later."""
    sealed_with = keys()

    def listen(context: Any, socket_type: Any, host: str | None = None) -> tuple[int, Any]:
        if sealed_with is None:
            return _listen(context, socket_type, host)
        with sealing.listening(context, sealed_with):
            port, socket = _listen(context, socket_type, host)
        if not sealing.is_sealed(socket):
            raise RuntimeError(f"ZeroMQ {zmq.zmq_version()} has not sealed the control port {port}: it lacks CURVE")
        sealing.watch(socket, f"control port {port} of the hand-over: {NOT_LET_IN}")
        sealing.speaks(context, sealed_with)
        return port, socket

    conn.get_zmq_socket_on_host = listen
    try:
        yield
    finally:
        conn.get_zmq_socket_on_host = get_zmq_socket_on_host


def receiver_context() -> zmq.Context[Any] | None:
    """For the sockets that a decode server's receivers connect with; None: SGLang's own."""
    sealed_with = keys()
    return None if sealed_with is None else sealing.SealedContext(sealed_with, NOT_SPOKEN_TO)
