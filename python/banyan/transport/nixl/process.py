# SPDX-License-Identifier: Apache-2.0
"""A rank's end of its NIXL process: started in the background, ended at any time, started again.

Invariants
  1. Where a pull has ended, nothing is written for it any more: its process has said so, or is dead.
  2. Nobody waits for a process to start. One that cannot be had now is none, and so is one that was to die.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from banyan.telemetry import start_thread
from banyan.transport.nixl.messages import (
    MAX_BYTES,
    OVER,
    Carry,
    Failed,
    Map,
    Mapped,
    ToProcess,
    encode,
    num_landed,
    read_by_rank,
)

logger = logging.getLogger("banyan")

START_S = 60.0
"""Beside a server that loads its weights an import takes long."""
MAP_S = 60.0
"""Where memory is registered with a card, which takes a second for a few GiB."""
SEND_S = 1.0
"""It hears at once, unless it stands still."""
DEATH_S = 2.0
LOOK_S = 0.25
DRAIN_S = 0.5
"""What is under way has so long to come."""
AGAIN_S, MOST_AGAIN_S = 5.0, 600.0
"""Between the starts of two in a row; twice as long after each that failed."""


class Declined(OSError):
    """NIXL has no such plugin, or does not take that memory."""


class StillWriting(Exception):
    """The process does not die: what it was to write to is not to be used."""

    def __init__(self, process: NixlProcess) -> None:
        super().__init__("a NIXL process does not end")
        self._process = process

    def when_over(self, over: Callable[[], None]) -> None:
        """Call it when the process is dead, however long that takes: never, where the system has no thread left."""

        def wait() -> None:
            self._process.popen.wait()
            _awaited.remove(over)
            over()

        _awaited.append(over)
        try:
            start_thread(wait, name="banyan-nixl-end", feature="frames of a NIXL process that does not end")
        except RuntimeError as error:
            logger.warning("banyan: frames of a NIXL process that does not end are not used again: %s", error)


_awaited: list[Callable[[], None]] = []
"""Of processes that may still write. A pull that nobody had any more would have ended, and given its frames back."""


class NixlProcess:
    """One of them. Making it waits until it is there.

    Raises:
        OSError: when it does not come to it.
    """

    def __init__(self, backend: str, role: str) -> None:
        self._lock = threading.Lock()
        self._is_condemned = False
        self.metadata = b""
        self.addresses: dict[tuple[int, int], int] = {}
        """Of what was mapped, by device and inode."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
        with theirs:
            # The arena is the host's: no GPU is to be begun for it.
            program = ["env", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "banyan.transport.nixl.program"]
            command = [*program, str(theirs.fileno()), backend, role]
            self.popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], close_fds=True
            )
        with self.killed_on_error():
            self._answer(START_S)

    @contextmanager
    def killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        # Where it does not die `poll` knows nothing: somebody else waits for its end.
        return not self._is_condemned and self.popen.poll() is None

    def map(self, path: str, identity: tuple[int, int] | None, num_bytes: int, *, is_writable: bool) -> int:
        """Let it map the memory at ``path``; where it has it. ``identity``: what has to lie there.

        Raises:
            OSError: when that cannot be.
        """
        fd = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
        try:
            state = os.fstat(fd)
            found = (state.st_dev, state.st_ino)
            if identity is not None and found != identity:
                raise OSError(f"{path} is another memory by now")
            with self._lock:
                self._send(Map(num_bytes, is_writable), fd)
                mapped = self._answer(MAP_S)
        finally:
            os.close(fd)
        self.addresses[found], self.metadata = mapped.address, mapped.metadata
        return mapped.address

    def carry(self, metadata: bytes, places: bytes, offsets: bytes, layer_bytes: Sequence[int]) -> Channel:
        """Begin a pull.

        Raises:
            OSError: when the process has gone, or does not hear.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = Channel(self, ours)
        try:
            with theirs, self._lock:
                self._send(Carry(metadata, places, offsets, list(layer_bytes)), theirs.fileno())
        except OSError:
            ours.close()
            raise
        return channel

    def kill(self) -> None:
        """When this returns it is dead.

        Raises:
            StillWriting: when it is not.
        """
        self._is_condemned = True
        self.popen.kill()
        # Who sends to it waits no longer; closed, its number could be another socket's by now.
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(DEATH_S)
            with self._lock:
                self._control.close()
            return
        logger.warning(
            "banyan: NIXL process %d does not end: what it reads to is not used until it has", self.popen.pid
        )
        raise StillWriting(self)

    def _send(self, message: ToProcess, fd: int) -> None:
        self._control.settimeout(SEND_S)
        socket.send_fds(self._control, [encode(message)], [fd], socket.MSG_NOSIGNAL)

    def _answer(self, most_s: float) -> Mapped:
        self._control.settimeout(most_s)
        payload = self._control.recv(MAX_BYTES)
        if not payload:
            raise ConnectionError("the NIXL process has ended")
        try:
            answer = read_by_rank(payload)
        except ValueError as error:
            raise OSError(f"the NIXL process says what it does not say: {error}") from error
        if isinstance(answer, Failed):
            raise Declined(answer.reason)
        return answer


class Channel:
    """What becomes of one pull. One thread."""

    def __init__(self, process: NixlProcess, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._channel.settimeout(LOOK_S)
        self._is_over = False

    def num_landed(self) -> int | None:
        """So many layers are in place; None: nothing was said for ``LOOK_S``.

        Raises:
            OSError: when no more will come.
        """
        try:
            payload = self._channel.recv(16)
        except TimeoutError:
            return None
        if not payload or payload == OVER:
            self._is_over = payload == OVER
            raise ConnectionError("the source, or the NIXL process, has ended")
        try:
            return num_landed(payload)
        except ValueError as error:
            raise OSError(f"the NIXL process says what it does not say: {error}") from error

    def end(self) -> None:
        """When this returns nothing is written any more.

        Raises:
            StillWriting: when that cannot be had.
        """
        with self._channel, suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            deadline_s = time.monotonic() + DRAIN_S
            while not self._is_over and time.monotonic() < deadline_s:
                if self.num_landed() is None:
                    break
        if not self._is_over:
            self._process.kill()


class Kept:
    """One process, and another when it is dead. ``make`` starts one and may take its time. Any thread."""

    def __init__(self, make: Callable[[], NixlProcess], *, what: str) -> None:
        self._make = make
        self._what = what
        self._lock = threading.Lock()
        self._process: NixlProcess | None = None
        self._is_starting = False
        self._is_closed = False
        self._again_s = AGAIN_S
        self._began_s = -AGAIN_S
        self.num_started = 0
        self.get()

    def get(self) -> NixlProcess | None:
        """One that is ready. Where there is none, one is started."""
        with self._lock:
            if self._process is not None and self._process.is_alive:
                return self._process
            self._process = None
            is_soon = time.monotonic() - self._began_s < self._again_s
            if self._is_starting or self._is_closed or is_soon:
                return None
            self._is_starting, self._began_s = True, time.monotonic()
        try:
            start_thread(self._start, name="banyan-nixl-start", feature=self._what)
        except RuntimeError:
            # The system has no thread left: it is tried again.
            self._is_starting = False
        return None

    def renew(self) -> None:
        """What there is will not do."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(StillWriting):
                process.kill()

    def close(self) -> None:
        """End it; none is started any more."""
        with self._lock:
            self._is_closed = True
        self.renew()

    def _start(self) -> None:
        process = None
        try:
            process = self._make()
        except Exception as error:  # noqa: BLE001 - whatever it is, another one is tried
            logger.warning("banyan: no NIXL process for %s, which goes by TCP: %s", self._what, error)
        with self._lock:
            self._is_starting = False
            self._again_s = min(MOST_AGAIN_S, 2 * self._again_s) if process is None else AGAIN_S
            self.num_started += process is not None
            is_late = self._is_closed
            if not is_late:
                self._process = process
        if is_late and process is not None:
            with suppress(StillWriting):
                process.kill()
