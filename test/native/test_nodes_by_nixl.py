# SPDX-License-Identifier: Apache-2.0
"""Pulls by real NIXL between two nodes: right bytes; and whoever dies, lies or stands still costs a recompute at most,
and no frame is used again while it may be written."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_worker import LAYER_BYTES, NUM_PAGES, node
from processes import Process
from test.unit.directory.rig import keys
from test.unit.features.nodes.rig import Node, free_address, until
from test_nodes import fetch, is_stopped

from banyan.features.nodes.nixl_pulls import LentByNixl, NixlCarrier, ReadByNixl
from banyan.features.nodes.tcp import STALL_S
from banyan.features.nodes.wire import ReadableLease
from banyan.transport.nixl.process import DRAIN_S, NixlProcess

WORKER = Path(__file__).with_name("node_worker.py")
WANTED = keys(*range(NUM_PAGES))
PLUGIN = "UCX"
NUM_LIES = 12

WRITER = """
import os
from array import array
from banyan.transport.nixl.agent import Agent
agent = Agent("writer", "UCX", answers=False)
mine = array("B", b"x" * 4096)
address, _ = mine.buffer_info()
agent.register(address, 4096)
name, nixl = agent.meet({metadata!r}), agent._agent
local, remote = (nixl.get_xfer_descs([(at, 4096, 0)], mem_type="DRAM") for at in (address, {place}))
handle = nixl.initialize_xfer("WRITE", local, remote, name)
try:
    state = nixl.transfer(handle)
    while state == "PROC":
        state = nixl.check_xfer_state(handle)
except Exception as error:
    print(repr(error))
os._exit(0)
"""
pytestmark = [pytest.mark.native, pytest.mark.usefixtures("tcp_alone")]
pytest.importorskip("nixl")


@pytest.fixture
def tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between nodes; on one, UCX would go through memory. A process that has ended is soon followed by another."""
    monkeypatch.setattr("banyan.transport.nixl.process.AGAIN_S", 0.2)
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_MODULES", "^ib")


class Reader(ReadByNixl):
    """Lets something happen when a pull begins, and when its first layer has come; ``lie`` changes what the lender has
    said."""

    begins: Callable[[], None] = staticmethod(lambda: None)
    happens: Callable[[], None] = staticmethod(lambda: None)
    lie: Callable[[ReadableLease], ReadableLease] = staticmethod(lambda lease: lease)

    def carrier(self, lease: ReadableLease) -> Any:
        return _Interrupted(super().carrier(self.lie(lease)), self)


class _Interrupted:
    def __init__(self, carrier: NixlCarrier, reader: Reader) -> None:
        self._carrier, self._reader = carrier, reader

    def pull(self, *args: Any, **named: Any) -> Generator[int, None, None]:
        self._reader.begins()
        layers = self._carrier.pull(*args, **named)
        try:
            for layer in layers:
                if layer == 0:
                    self._reader.happens()
                yield layer
        finally:
            layers.close()


@pytest.fixture
def borrower() -> Iterator[Node]:
    made = node()
    made.address = free_address()
    made.reader = Reader(PLUGIN, made.memory)
    made.borrow_from(made.address, by_nixl=[made.reader])
    yield made
    made.close()


@pytest.fixture
def lend() -> Iterator[Callable[[Node], Process]]:
    begun: list[Process] = []

    def begin(borrower: Node) -> Process:
        begun.append(Process(WORKER, borrower.address.port, PLUGIN))
        begun[-1].expect("lending")
        until(lambda: borrower.reader.is_ready, timeout_s=60)
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()


def own_process(of: int) -> psutil.Process:
    """Its NIXL process."""
    (found,) = [one for one in psutil.Process(of).children() if "banyan.transport.nixl.program" in one.cmdline()]
    return found


def expected() -> list[Any]:
    other = node()
    return [other.rank.pages(page) for page in range(NUM_PAGES)]


def forget(borrower: Node) -> None:
    """What it has pulled."""
    borrower.rank.frame_table.reset()
    borrower.residency.reset()


def by_nixl(borrower: Node) -> int:
    return borrower.reader.num_carried


def test_pull_when_both_ends_have_nixl_then_the_bytes_come_by_it_and_the_lease_ends(borrower, lend) -> None:
    lend(borrower)
    assert fetch(borrower, "first")[0]
    assert by_nixl(borrower) == 1
    assert [borrower.rank.pages(page) for page in range(NUM_PAGES)] == expected()
    assert borrower.counters.pull_bytes == NUM_PAGES * LAYER_BYTES * 3


def test_pull_when_the_lender_has_no_nixl_then_the_bytes_come_over_tcp(borrower) -> None:
    process = Process(WORKER, borrower.address.port)
    process.expect("lending")
    until(lambda: borrower.reader.is_ready, timeout_s=60)
    assert fetch(borrower, "first")[0]
    assert by_nixl(borrower) == 0
    process.kill()


def test_pull_when_its_source_is_killed_then_it_fails_at_once_and_the_next_one_goes_on(borrower, lend) -> None:
    process = lend(borrower)
    own = own_process(process.popen.pid)

    def kill() -> None:
        killed_s.append(time.monotonic())
        process.kill()
        own.kill()

    killed_s: list[float] = []
    # So few bytes would have come before it is dead.
    own.suspend()
    until(lambda: is_stopped(own.pid))
    borrower.reader.begins = lambda: threading.Timer(0.2, kill).start()
    landed, _ = fetch(borrower, "killed")
    assert not landed and time.monotonic() - killed_s[0] < STALL_S + DRAIN_S, "not by a time-out"
    assert borrower.residency.num_resident == 0
    borrower.reader.begins = lambda: None
    lend(borrower)
    assert fetch(borrower, "again")[0]
    assert [borrower.rank.pages(page) for page in range(NUM_PAGES)] == expected()


def test_pull_when_its_source_stands_still_then_it_fails_in_seconds_and_what_comes_later_is_written_nowhere(
    borrower, lend
) -> None:
    process = lend(borrower)
    own = own_process(process.popen.pid)
    first = own_process(os.getpid())

    def stop() -> None:
        own.suspend()
        until(lambda: is_stopped(own.pid))

    borrower.reader.happens = stop
    landed, took_s = fetch(borrower, "stopped")
    assert not landed and took_s < 5 * STALL_S
    assert not first.is_running(), "what was under way could not be called back"
    before = bytes(memoryview(borrower.memory))
    own.resume()
    time.sleep(0.3)
    assert bytes(memoryview(borrower.memory)) == before
    borrower.reader.happens = lambda: None
    until(lambda: borrower.reader.is_ready, timeout_s=60)
    assert fetch(borrower, "again")[0]
    assert [borrower.rank.pages(page) for page in range(NUM_PAGES)] == expected()


def test_pull_when_the_process_of_either_end_is_killed_then_it_fails_and_the_rank_goes_on(borrower, lend) -> None:
    process = lend(borrower)
    for number, of in enumerate((os.getpid(), process.popen.pid)):
        until(lambda: borrower.reader.is_ready, timeout_s=60)
        borrower.reader.happens = own_process(of).kill
        landed, _ = fetch(borrower, f"killed-{number}")
        assert not landed
        borrower.reader.happens = lambda: None
        assert fetch(borrower, f"over-tcp-{number}")[0], "until there is another"
        forget(borrower)


def changed(rng: random.Random, agent: bytes) -> bytes:
    """An agent that there is not, or that cannot be."""
    wrong = bytearray(agent)
    for _ in range(rng.randint(1, 4)):
        wrong[rng.randrange(len(wrong))] = rng.randrange(256)
    return rng.choice([bytes(wrong), agent[: rng.randrange(len(agent))] or b"x", rng.randbytes(200)])


def test_agent_when_it_is_described_wrongly_then_a_pull_fails_and_the_rank_goes_on(borrower, lend, monkeypatch) -> None:
    monkeypatch.setattr("banyan.features.nodes.carriers.NUM_FAILED", NUM_LIES + 1)
    lend(borrower)
    rng = random.Random(1)
    num_landed = 0
    for number in range(NUM_LIES):
        until(lambda: borrower.reader.is_ready, timeout_s=60)
        was = borrower.borrower.num_lost

        def lie(lease: ReadableLease) -> ReadableLease:
            return ReadableLease(
                lease.number, lease.token, lease.port, lease.sums, changed(rng, lease.agent), lease.places
            )

        borrower.reader.lie = lie
        landed, took_s = fetch(borrower, f"lied-{number}")
        num_landed += landed
        assert took_s < 5 * STALL_S
        if not landed:
            until(lambda was=was: borrower.borrower.num_lost == was + 1)
        else:
            assert [borrower.rank.pages(page) for page in range(NUM_PAGES)] == expected()
        forget(borrower)
    assert num_landed < NUM_LIES
    borrower.reader.lie = lambda lease: lease
    until(lambda: borrower.reader.is_ready, timeout_s=60)
    assert fetch(borrower, "again")[0]


def test_arena_when_another_node_writes_to_it_then_it_stays_and_only_the_process_ends() -> None:
    lender = node()
    lender.keep(range(NUM_PAGES), range(NUM_PAGES))
    lent = LentByNixl(PLUGIN)
    lent.lend(lender.exported().memories)
    until(lambda: lent.is_ready, timeout_s=60)
    before, first = bytes(memoryview(lender.memory)), own_process(os.getpid())
    process = lent._kept.get()
    code = WRITER.format(metadata=process.metadata, place=next(iter(process.addresses.values())))
    subprocess.run([sys.executable, "-c", code], stdout=2, timeout=60, check=True)
    first.wait(10)
    assert bytes(memoryview(lender.memory)) == before
    lent.withdraw()


def test_rank_when_it_borrows_no_more_then_its_process_is_gone(borrower, lend) -> None:
    lend(borrower)
    own = own_process(os.getpid())
    borrower.borrower.close()
    assert not own.is_running()


def test_process_when_its_rank_dies_then_it_goes_too(borrower, lend) -> None:
    process = lend(borrower)
    own = own_process(process.popen.pid)
    process.kill()
    own.wait(10)


def test_process_when_there_is_no_such_plugin_then_it_says_which_there_are() -> None:
    with pytest.raises(OSError, match=r"NIXL has no plugin NONE: it has .*UCX"):
        NixlProcess("NONE", "borrow")
