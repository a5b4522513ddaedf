# SPDX-License-Identifier: Apache-2.0
"""A rank's NIXL process: ``python -m banyan.transport.nixl.program FD BACKEND ROLE``. ``FD`` is a socket to the rank;
``ROLE`` is ``lend`` or ``borrow``.

Invariants
  1. It ends with its rank, and at the first error of NIXL: what else may be under way then is over with it.
  2. `OVER` is said of a pull only when none of its reads is under way.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

import numpy as np

from banyan.transport.nixl.agent import Agent
from banyan.transport.nixl.layer_reads import Reading
from banyan.transport.nixl.messages import (
    MAX_BYTES,
    MAX_REASON,
    OVER,
    Carry,
    Failed,
    Map,
    Mapped,
    encode,
    landed,
    read_by_process,
)

FIRST_PAUSE_S, MOST_PAUSE_S = 50e-6, 1e-3
"""Between two looks at reads that are under way."""


class Program:
    """The loop. One thread."""

    def __init__(self, control: socket.socket, engine: Agent) -> None:
        self._control = control
        self._engine = engine
        self._base = 0
        self._maps: list[mmap.mmap] = []
        self._pulls: dict[socket.socket, Reading] = {}
        self._pause_s = FIRST_PAUSE_S

    def run(self) -> None:
        """Until the rank has gone."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Whether it goes on."""
        ready = self._ready()
        for channel, reading in self._pulls.items():
            # It says nothing but that it goes.
            if channel.fileno() in ready:
                reading.stop()
        if self._control.fileno() in ready and not self._hear():
            return False
        has_moved = [self._step(channel, reading) for channel, reading in list(self._pulls.items())]
        self._pause_s = FIRST_PAUSE_S if any(has_moved) else min(MOST_PAUSE_S, 2 * self._pause_s)
        return True

    def _ready(self) -> set[int]:
        """Sockets that have something. Not by `select`, which takes no number from 1024 on: those of a rank may be."""
        if self._pulls and not any(reading.has_room for reading in self._pulls.values()):
            # `poll` knows no less than a millisecond.
            time.sleep(self._pause_s)
        poll = select.poll()
        for one in (self._control, *self._pulls):
            poll.register(one, select.POLLIN)
        return {number for number, _ in poll.poll(0 if self._pulls else None)}

    def _hear(self) -> bool:
        payload, fds, _, _ = socket.recv_fds(self._control, MAX_BYTES, 1)
        if not payload:
            return False
        message = read_by_process(payload)
        if isinstance(message, Map):
            return self._map(message, fds[0])
        else:
            self._carry(message, socket.socket(fileno=fds[0]))
        return True

    def _map(self, message: Map, fd: int) -> bool:
        """Whether that could be."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if message.is_writable else 0)
        memory = mmap.mmap(fd, message.num_bytes, mmap.MAP_SHARED, access)
        os.close(fd)
        self._maps.append(memory)
        self._base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        try:
            metadata = self._engine.register(self._base, message.num_bytes)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have nothing in common but this
            self._control.send(encode(Failed(f"{error}"[:MAX_REASON])))
            return False
        self._control.send(encode(Mapped(self._base, metadata)))
        return True

    def _carry(self, message: Carry, channel: socket.socket) -> None:
        peer = self._engine.meet(message.metadata)
        reading = Reading(peer, self._base, message.offsets, message.places, message.layer_bytes)
        self._pulls[channel] = reading

    def _step(self, channel: socket.socket, reading: Reading) -> bool:
        """Whether anything has come."""
        before = reading.num_done
        reading.step(self._engine)
        try:
            if reading.num_done != before:
                channel.send(landed(reading.num_landed))
            if reading.is_over:
                channel.send(OVER)
        except OSError:
            # Nobody listens any more.
            reading.stop()
        if reading.is_over:
            del self._pulls[channel]
            channel.close()
        return reading.num_done != before


def main(fd: int, backend: str, role: str) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=fd)
    try:
        agent = Agent(f"banyan-{role}-{os.urandom(8).hex()}", backend, answers=role == "lend")
    except Exception as error:  # noqa: BLE001 - NIXL's errors have nothing in common but this
        control.send(encode(Failed(f"{error}"[:MAX_REASON])))
        os._exit(1)
    control.send(encode(Mapped(0, b"")))
    try:
        Program(control, agent).run()
    except Exception as error:  # noqa: BLE001
        # One line: what another node says of itself may have brought it about, again and again.
        print(f"banyan: a NIXL process ends: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
