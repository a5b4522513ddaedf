# SPDX-License-Identifier: Apache-2.0
"""The source of a pull is killed, or stands still, in mid-pull: the puller is told in time, and keeps nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_worker import LAYER_BYTES, NUM_PAGES, node
from processes import Process
from test.unit.cache_rig import request
from test.unit.directory.rig import frames, keys
from test.unit.features.nodes.rig import Node, free_address, until, whole

from banyan.arena.page_source import Wanted
from banyan.core import Address
from banyan.features.nodes.tcp import STALL_S, Layers, TcpCarrier

WORKER = Path(__file__).with_name("node_worker.py")
WANTED = keys(*range(NUM_PAGES))
NUM_KILLS = 2
NUM_TRIES = 3

pytestmark = pytest.mark.native


class Interrupted(TcpCarrier):
    """Lets something happen when the first layer has come."""

    def __init__(self) -> None:
        super().__init__()
        self.happens: Callable[[], None] = lambda: None

    def pull(
        self, source: Address, token: bytes, target: Layers, num_layers: int, **named: Any
    ) -> Generator[int, None, None]:
        for layer in super().pull(source, token, target, num_layers, **named):
            if layer == 0:
                self.happens()
            yield layer


@pytest.fixture
def carrier() -> Interrupted:
    return Interrupted()


@pytest.fixture
def borrower(carrier: Interrupted) -> Iterator[Node]:
    made = node()
    made.address = free_address()
    made.borrow_from(made.address, carrier=carrier)
    yield made
    made.close()


def lender(address: Address) -> Process:
    process = Process(WORKER, address.port)
    process.expect("lending")
    return process


def stop(pid: int) -> None:
    """Returns when it stands: no system call of its threads goes on."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))


def is_stopped(pid: int) -> bool:
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def offered(borrower: Node, rid: str) -> str:
    """The request, by its name, of which all pages are offered: an answer that comes too late is as none."""
    for number in range(NUM_TRIES):
        name = f"{rid}-{number}"
        until(lambda: borrower.borrower.num_listening == 1, timeout_s=30)
        borrower.remote.ask(Wanted(name, WANTED, 0, whole))
        borrower.wait_answered(name)
        if borrower.cache.prepare(request(name), WANTED).num_pages == NUM_PAGES:
            return name
    raise AssertionError(f"{rid}: the node's answer never came in time")


def fetch(borrower: Node, rid: str) -> tuple[bool, float]:
    """Pull all pages into the pool; whether they landed, and how long that took after the answer."""
    rid = offered(borrower, rid)
    assert borrower.cache.admit(rid, WANTED, frames(*range(NUM_PAGES))) is not None
    started_s = time.monotonic()
    landed = borrower.cache.finish(borrower.cache.start())
    took_s = time.monotonic() - started_s

    def has_ended() -> bool:
        """The last layer is through, or will not come; the carrier's thread says a moment later that it has let go."""
        borrower.poll()
        return borrower.residency.num_filling == 0

    until(has_ended, timeout_s=30)
    return landed, took_s


def test_pull_when_its_source_is_killed_then_it_fails_at_once_and_the_next_one_goes_on(borrower, carrier) -> None:
    for number in range(NUM_KILLS):
        process = lender(borrower.address)
        carrier.happens = process.kill
        landed, took_s = fetch(borrower, f"killed-{number}")
        assert not landed and took_s < STALL_S, "not by a time-out"
        assert borrower.residency.num_resident == 0
    carrier.happens = lambda: None
    process = lender(borrower.address)
    assert fetch(borrower, "again")[0]
    expected = node()
    assert [borrower.rank.pages(page) for page in range(NUM_PAGES)] == [
        expected.rank.pages(page) for page in range(NUM_PAGES)
    ]
    assert borrower.counters.pull_bytes >= NUM_PAGES * LAYER_BYTES * (NUM_KILLS + 3)
    process.kill()


def test_pull_when_its_source_stands_still_then_it_fails_in_seconds_and_is_good_again_when_that_goes_on(
    borrower, carrier
) -> None:
    process = lender(borrower.address)
    pid = process.popen.pid
    carrier.happens = lambda: stop(pid)
    landed, took_s = fetch(borrower, "stopped")
    assert not landed and took_s < 5 * STALL_S
    until(lambda: borrower.borrower.num_listening == 0)
    borrower.remote.ask(Wanted("meanwhile", WANTED, 0, whole))
    assert not borrower.remote.is_awaited("meanwhile"), "it was found to be silent"
    carrier.happens = lambda: None
    os.kill(pid, signal.SIGCONT)
    assert fetch(borrower, "again")[0]
    process.kill()
