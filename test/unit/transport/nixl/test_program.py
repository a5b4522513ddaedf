# SPDX-License-Identifier: Apache-2.0
"""The loop of a NIXL process, over its real sockets, with a stand-in for NIXL."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from banyan.transport.nixl.messages import OVER, Carry, Failed, Map, Mapped, encode, num_landed, read_by_rank
from banyan.transport.nixl.program import Program

NUM_BYTES = 8192
LAYERS = [1024, 3072]
THERE = b"\7" * NUM_BYTES


class Copies:
    """Reads are copies out of ``THERE``, done when they may be."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.met: list[bytes] = []
        self.registered: list[tuple[int, int]] = []
        self.errs = self.declines = False

    def register(self, address: int, num_bytes: int, /) -> bytes:
        if self.declines:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.registered.append((address, num_bytes))
        return b"about this agent"

    def meet(self, metadata: bytes, /) -> str:
        self.met.append(metadata)
        return "there"

    def begin(self, peer: str, to: Any, from_: Any, /) -> Any:
        return [(int(a[0]), int(b[0]), int(a[1])) for a, b in zip(to, from_, strict=True)]

    def is_done(self, handle: Any, /) -> bool:
        if self.errs:
            raise OSError("NIXL errs")
        if not self.may.is_set():
            return False
        for place, source, num_bytes in handle:
            ctypes.memmove(place, THERE[source : source + num_bytes], num_bytes)
        return True


class Rig:
    def __init__(self) -> None:
        self.copies = Copies()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(5)
        self.error: BaseException | None = None
        self._theirs = theirs
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.fd = os.memfd_create("rig")
        os.ftruncate(self.fd, NUM_BYTES)
        self.memory = mmap.mmap(self.fd, NUM_BYTES)

    def _run(self) -> None:
        try:
            Program(self._theirs, self.copies).run()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def ask(self) -> Mapped | Failed:
        socket.send_fds(self.control, [encode(Map(NUM_BYTES, True))], [self.fd])
        return read_by_rank(self.control.recv(1 << 16))

    def map(self) -> Mapped:
        answer = self.ask()
        assert isinstance(answer, Mapped)
        return answer

    def carry(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(5)
        words = [array("Q", places).tobytes() for places in ([0, 4096], [4096, 0])]
        with theirs:
            socket.send_fds(self.control, [encode(Carry(b"there", *words, LAYERS))], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self.control.close()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_memory_when_it_is_mapped_then_it_is_registered_and_its_place_is_told(rig) -> None:
    mapped = rig.map()
    assert rig.copies.registered == [(mapped.address, NUM_BYTES)]
    assert mapped.metadata == b"about this agent"


def test_memory_when_nixl_does_not_take_it_then_that_is_told_and_the_process_ends(rig) -> None:
    rig.copies.declines = True
    assert rig.ask() == Failed("NIXL_ERR_BACKEND")
    rig.thread.join(5)
    assert not rig.thread.is_alive() and rig.error is None


def test_pull_when_all_comes_then_layers_are_told_in_order_and_its_end(rig) -> None:
    rig.map()
    rig.copies.may.set()
    with rig.carry() as channel:
        told = []
        while (said := channel.recv(16)) != OVER:
            told.append(num_landed(said))
        assert told == sorted(told) and told[-1] == len(LAYERS)
        assert channel.recv(16) == b"", "it lets go"
    assert rig.memory[:] == THERE and rig.copies.met == [b"there"]


def test_pull_when_its_rank_lets_go_then_it_is_over_only_when_nothing_is_under_way(rig) -> None:
    rig.map()
    with rig.carry() as channel:
        channel.settimeout(0.1)
        with pytest.raises(TimeoutError):
            channel.recv(16)
        channel.shutdown(socket.SHUT_WR)
        with pytest.raises(TimeoutError):
            channel.recv(16)
        channel.settimeout(5)
        rig.copies.may.set()
        while channel.recv(16) != OVER:
            pass


def test_pulls_when_there_are_two_then_each_is_told_of_its_own(rig) -> None:
    rig.map()
    rig.copies.may.set()
    with rig.carry() as one, rig.carry() as other:
        for channel in (one, other):
            while channel.recv(16) != OVER:
                pass


@pytest.fixture
def many_open() -> Iterator[None]:
    """Sockets that are made now have numbers beyond 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pull_when_its_rank_has_more_than_a_thousand_files_open_then_it_is_served(many_open, rig) -> None:
    rig.map()
    rig.copies.may.set()
    with rig.carry() as channel:
        while channel.recv(16) != OVER:
            pass


def test_process_when_nixl_errs_then_it_ends(rig) -> None:
    rig.map()
    rig.copies.errs = True
    with rig.carry():
        rig.thread.join(5)
    assert isinstance(rig.error, OSError)


def test_process_when_its_rank_has_gone_then_it_ends(rig) -> None:
    rig.control.shutdown(socket.SHUT_RDWR)
    rig.thread.join(5)
    assert not rig.thread.is_alive() and rig.error is None
