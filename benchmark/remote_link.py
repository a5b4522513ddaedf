# SPDX-License-Identifier: Apache-2.0
"""The bytes of a remote lease against a bare NIXL READ of the same pages: between two processes, both over TCP, taking
turns.

`run` starts the other process. Rates are of whole transfers, from the wish to the last byte, verified on our side and
not on NIXL's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from banyan import _native
from banyan.core import Address
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.pull import NodeFound
from banyan.features.nodes.tcp import TcpCarrier
from banyan.layout import BlockGeometry
from banyan.transport.sealed.secret import Keys
from benchmark.servers import free_port

NAMESPACE = b"n" * 32
KEYS = Keys.of(b"a secret of this benchmark")
BLOCK = BlockGeometry(((6144, 6144),) * 30)
"""A page of 16 tokens of SmolLM2-135M, in bfloat16."""
NUM_PAGES = 125
NIXL_ENV = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}
PATIENCE_S = 60.0
DESCRIBED = "described"
"""Before the line that the other process is to say; NIXL prints lines of its own."""


def _page_keys() -> list[str]:
    return [hashlib.sha256(str(page).encode()).hexdigest() for page in range(NUM_PAGES)]


def _offsets() -> array[int]:
    return array("q", [page * BLOCK.frame_bytes for page in range(NUM_PAGES)])


def _memory(label: str) -> _native.SharedBytes:
    return _native.SharedBytes.create(NUM_PAGES * BLOCK.frame_bytes, label)


class _Agent:
    """NIXL over the whole of a memory."""

    def __init__(self, name: str, memory: _native.SharedBytes) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.address = _address_of(memory)
        self._registered = self._agent.register_memory([(self.address, memory.num_bytes, 0, "")], "DRAM")

    def describe(self) -> str:
        return f"{self.address} {base64.b64encode(self._agent.get_agent_metadata()).decode()}"

    def meet(self, description: str) -> None:
        address, metadata = description.split()
        self._remote = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._remote_address = int(address)

    def read(self) -> float:
        """READ all pages, a descriptor for each; seconds."""
        agent, size = self._agent, BLOCK.block_bytes
        local, remote = (
            agent.get_xfer_descs([(start + offset, size, 0) for offset in _offsets()], "DRAM")
            for start in (self.address, self._remote_address)
        )
        started_s = time.perf_counter()
        handle = agent.initialize_xfer("READ", local, remote, self._remote)
        state = agent.transfer(handle)
        while state != "DONE":
            if state == "ERR" or time.perf_counter() - started_s > PATIENCE_S:
                raise RuntimeError(f"NIXL: {state}")
            time.sleep(0.0005)
            state = agent.check_xfer_state(handle)
        took_s = time.perf_counter() - started_s
        agent.release_xfer_handle(handle)
        return took_s


def _address_of(memory: _native.SharedBytes) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def lend() -> None:
    """The other process."""
    memory = _memory("lender")
    memoryview(memory)[:] = os.urandom(memory.num_bytes)
    rank_table = _native.RankTable.create(1)
    frame_table = _native.FrameTable(rank_table, 0, NAMESPACE, memory, NUM_PAGES, BLOCK.table(), BLOCK.frame_bytes)
    frame_table.publish(array("q", range(NUM_PAGES)), _page_keys())
    peers = _native.Peers(rank_table, None, 1, NAMESPACE, BLOCK.table(), memory, BLOCK.frame_bytes)
    address = Address("127.0.0.1", int(sys.argv[1]))
    page_server = PageServer(address, KEYS, max_pages=2 * NUM_PAGES, num_layers=len(BLOCK.layer_bytes))
    page_server.lending.lend(ExportedArena(peers, namespace=NAMESPACE, arena_slots=[0], block=BLOCK))
    agent = _Agent("lender", memory)
    print(DESCRIBED, agent.describe(), flush=True)
    sys.stdin.read()
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0)


class _Timed(TcpCarrier):
    """Notes when the first layer had come, and when all had."""

    first_s = 0.0
    whole_s = 0.0

    def pull(self, *args: Any, **named: Any) -> Iterator[int]:  # type: ignore[override]
        started_s = time.perf_counter()
        for layer in super().pull(*args, **named):
            if layer == 0:
                self.first_s = time.perf_counter() - started_s
            yield layer
        self.whole_s = time.perf_counter() - started_s


def run(num_repeats: int) -> list[dict[str, float]]:
    """One row for each repeat: seconds of the whole pull from the wish on, of its transfer, of its first layer, and of
    NIXL's READ."""
    os.environ.update(NIXL_ENV)
    memory, address = _memory("borrower"), Address("127.0.0.1", free_port())
    with subprocess.Popen(
        [sys.executable, "-m", "benchmark.remote_link", str(address.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as lender:
        assert lender.stdout is not None and lender.stdin is not None
        described = next((line for line in lender.stdout if line.startswith(DESCRIBED)), None)
        if described is None:
            raise RuntimeError("the lender has ended")
        agent, carrier = _Agent("borrower", memory), _Timed()
        agent.meet(described.removeprefix(DESCRIBED))
        borrower = Borrower([address], KEYS, namespace=NAMESPACE, block=BLOCK, carrier=carrier)
        _wait(borrower)
        rows = [_turn(borrower, carrier, agent, memory, number) for number in range(num_repeats + 1)]
        borrower.close()
        lender.stdin.close()
    # The first of each has made connections.
    return rows[1:]


def _wait(borrower: Borrower) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not borrower.num_listening:
        if time.monotonic() > deadline_s:
            raise RuntimeError("the lender does not answer")
        time.sleep(0.01)


def _turn(
    borrower: Borrower, carrier: _Timed, agent: _Agent, memory: _native.SharedBytes, number: int
) -> dict[str, float]:
    row: dict[str, float] = {}
    for way in ("pull", "nixl") if number % 2 else ("nixl", "pull"):
        if way == "nixl":
            row["nixl_s"] = agent.read()
            continue
        read = borrower.read(NodeFound("the lender", 0, _page_keys()), NUM_PAGES, memory, _offsets())
        failed = read.finish()
        if failed:
            raise RuntimeError(f"{len(failed)} of {NUM_PAGES} pages did not come")
        row |= {"pull_s": read.read_s, "transfer_s": carrier.whole_s, "first_layer_s": carrier.first_s}
    return row


def figures(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """``remote_rate_to_nixl`` and ``remote_first_layer_share`` of each repeat. NIXL's clock starts before a request is
    made, so ours does, too: ``pull_s`` has the wish in it, ``transfer_s`` has not."""
    return {
        "remote_rate_to_nixl": [row["nixl_s"] / row["pull_s"] for row in rows],
        "remote_first_layer_share": [row["first_layer_s"] / row["transfer_s"] for row in rows],
    }


if __name__ == "__main__":
    lend()
