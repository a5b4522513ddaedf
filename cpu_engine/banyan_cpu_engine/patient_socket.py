# SPDX-License-Identifier: Apache-2.0
"""A dispatcher that waits for messages: SGLang's tests an empty socket a million times a second, and keeps a whole core
from the ranks, which compute on the same processor.
"""

from __future__ import annotations

from typing import Any

import zmq

from banyan.sglang_plugin import runtime
from banyan_cpu_engine import server

POLL_MS = 200
"""How long one look may wait; the dispatcher's watchdog wants to be fed more often than that by far."""


def before_event_loop(controller: Any) -> None:
    """Before SGLang's loop over its dispatcher's messages. Banyan's placement has a loop of its own, which waits."""
    if server.is_on() and (runtime.config() is None or not runtime.is_on("placement")):
        controller.recv_from_tokenizer = PatientSocket(controller.recv_from_tokenizer)


class PatientSocket:
    """A socket of which a look that finds nothing has waited for something."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> Any:
        self._wait(flags)
        return self._socket.recv(flags=flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        self._wait(flags)
        return self._socket.recv_pyobj(flags=flags)

    def _wait(self, flags: int) -> None:
        if flags & zmq.NOBLOCK:
            self._socket.poll(POLL_MS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
