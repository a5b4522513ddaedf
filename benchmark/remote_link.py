# SPDX-License-Identifier: Apache-2.0
"""The bytes of a remote lease, over TCP and by NIXL, against a bare NIXL READ of the same pages: between two processes,
taking turns.

`run` starts the other process. Rates are of whole transfers, from the wish to the last byte, verified on our side and
not on bare NIXL's. Processor time is of all processes of both ends, over as many transfers in a row as a clock of 10 ms
needs. NIXL's progress threads pause, as they do in Banyan's servers: one that spins would take a core from everybody.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import psutil

from banyan import _native
from banyan.core import Address
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.nixl_pulls import LentByNixl, NixlCarrier, ReadByNixl
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.pull import NodeFound
from banyan.features.nodes.tcp import TcpCarrier
from banyan.features.nodes.wire import ReadableLease
from banyan.layout import BlockGeometry
from banyan.transport.nixl.agent import LENDING_PAUSE_US, pausing_progress
from banyan.transport.sealed.secret import Keys
from benchmark.servers import free_port

NAMESPACE = b"n" * 32
KEYS = Keys.of(b"a secret of this benchmark")
BLOCK = BlockGeometry(((6144, 6144),) * 30)
"""A page of 16 tokens of SmolLM2-135M, in bfloat16."""
NUM_PAGES = 125
NIXL_ENV = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}
"""As between nodes without RDMA."""
MEMORY_ENV = {"UCX_TLS": "all", "UCX_MODULES": "^ib"}
"""Through shared memory, which stands for a network that needs no processor of the lender's."""
ENVS = {"over_tcp": NIXL_ENV, "through_memory": MEMORY_ENV}
PLUGIN = "UCX"
NUM_IN_A_ROW = 8
WAYS = ("tcp", "by_nixl", "bare")
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

        with pausing_progress(LENDING_PAUSE_US):
            config = nixl_agent_config(enable_prog_thread=name == "lender", backends=[PLUGIN])
            self._agent = nixl_agent(name, config)
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


def lend(port: int) -> NoReturn:
    """The other process."""
    memory = _memory("lender")
    memoryview(memory)[:] = os.urandom(memory.num_bytes)
    rank_table = _native.RankTable.create(1)
    frame_table = _native.FrameTable(rank_table, 0, NAMESPACE, memory, NUM_PAGES, BLOCK.table(), BLOCK.frame_bytes)
    frame_table.publish(array("q", range(NUM_PAGES)), _page_keys())
    peers = _native.Peers(rank_table, None, 1, NAMESPACE, BLOCK.table(), memory, BLOCK.frame_bytes)
    address = Address("127.0.0.1", port)
    by_nixl = LentByNixl(PLUGIN)
    page_server = PageServer(address, KEYS, max_pages=4 * NUM_PAGES, num_layers=len(BLOCK.layer_bytes), by_nixl=by_nixl)
    page_server.lending.lend(ExportedArena(peers, namespace=NAMESPACE, arena_slots=[0], block=BLOCK))
    agent = _Agent("lender", memory)
    _wait(lambda: by_nixl.is_ready)
    print(DESCRIBED, agent.describe(), flush=True)
    sys.stdin.read()
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0)


class _Times:
    """When the first layer had come, and when all had."""

    first_s = 0.0
    whole_s = 0.0

    def of(self, layers: Iterator[int]) -> Iterator[int]:
        started_s = time.perf_counter()
        for layer in layers:
            if layer == 0:
                self.first_s = time.perf_counter() - started_s
            yield layer
        self.whole_s = time.perf_counter() - started_s


class _TimedTcp(TcpCarrier):
    def __init__(self, times: _Times) -> None:
        super().__init__()
        self._times = times

    def pull(self, *args: Any, **named: Any) -> Iterator[int]:  # type: ignore[override]
        yield from self._times.of(super().pull(*args, **named))


class _TimedNixl(NixlCarrier):
    times: _Times

    def pull(self, *args: Any, **named: Any) -> Iterator[int]:  # type: ignore[override]
        yield from self.times.of(super().pull(*args, **named))


class _Reader(ReadByNixl):
    """Reads while it ``may``."""

    def __init__(self, memory: _native.SharedBytes, times: _Times) -> None:
        self.may = True
        self._times = times
        super().__init__(PLUGIN, memory)

    @property
    def is_ready(self) -> bool:
        return self.may and super().is_ready

    def carrier(self, lease: ReadableLease) -> NixlCarrier:
        carrier = _TimedNixl(self._kept.get, lease, carried=self._carried)
        carrier.times = self._times
        return carrier


class _Ends:
    """Both ends of the link, as this process sees them."""

    def __init__(self, lender: subprocess.Popen[str], described: str, address: Address) -> None:
        memory = _memory("borrower")
        self._memory = memory
        self._lender = lender
        self._times = _Times()
        self._agent = _Agent("borrower", memory)
        self._agent.meet(described)
        self._reader = _Reader(memory, self._times)
        self._borrower = Borrower(
            [address],
            KEYS,
            namespace=NAMESPACE,
            block=BLOCK,
            carrier=_TimedTcp(self._times),
            by_nixl=[self._reader],
        )
        _wait(lambda: self._borrower.num_listening == 1 and self._reader.is_ready)

    def close(self) -> None:
        self._borrower.close()

    def turn(self, number: int) -> dict[str, float]:
        """Each way once, in an order that rotates."""
        row: dict[str, float] = {}
        for place in range(len(WAYS)):
            way = WAYS[(place + number) % len(WAYS)]
            self._reader.may = way == "by_nixl"
            num_carried, cpu_s = self._reader.num_carried, self._cpu_s()
            took = [self._agent.read() if way == "bare" else self._pull() for _ in range(NUM_IN_A_ROW)]
            spent_s = self._cpu_s() - cpu_s
            if (self._reader.num_carried - num_carried) != (NUM_IN_A_ROW if way == "by_nixl" else 0):
                raise RuntimeError(f"not all pulls went as they were to: {way}")
            row[f"{way}_s"] = statistics.median(took)
            row[f"{way}_cpu_s_per_gb"] = 1e9 * spent_s / (NUM_IN_A_ROW * NUM_PAGES * BLOCK.block_bytes)
            if way != "bare":
                row |= {f"{way}_transfer_s": self._times.whole_s, f"{way}_first_layer_s": self._times.first_s}
        return row

    def _pull(self) -> float:
        memory = self._memory
        read = self._borrower.read(NodeFound("the lender", 0, _page_keys()), NUM_PAGES, memory, _offsets())
        failed = read.finish()
        if failed:
            raise RuntimeError(f"{len(failed)} of {NUM_PAGES} pages did not come")
        return float(read.read_s)

    def _cpu_s(self) -> float:
        """Processor time of both ends and of their NIXL processes."""
        ends = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(end.cpu_times()[:2]) for end in ends)


def run(num_repeats: int, env: Mapping[str, str] = NIXL_ENV) -> list[dict[str, float]]:
    """One row for each repeat, of each way: seconds of a whole pull from the wish on, of the last one's transfer and of
    its first layer, and processor time. In a process of its own, as UCX reads ``env`` once."""
    command = [sys.executable, "-m", "benchmark.remote_link", "run", str(num_repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **env})
    rows: list[dict[str, float]] = json.loads(_told(done.stdout.splitlines()))
    return rows


def _told(lines: Iterable[str]) -> str:
    for line in lines:
        if line.startswith(DESCRIBED):
            return line.removeprefix(DESCRIBED)
    raise RuntimeError("the other process has ended")


def _run_here(num_repeats: int) -> list[dict[str, float]]:
    address = Address("127.0.0.1", free_port())
    with subprocess.Popen(
        [sys.executable, "-m", "benchmark.remote_link", "lend", str(address.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as lender:
        assert lender.stdout is not None and lender.stdin is not None
        ends = _Ends(lender, _told(lender.stdout), address)
        rows = [ends.turn(number) for number in range(num_repeats + 1)]
        ends.close()
        lender.stdin.close()
    # The first of each has made connections.
    return rows[1:]


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError("the two ends do not come to it")
        time.sleep(0.01)


def figures(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Of each repeat. Bare NIXL's clock starts before a request is made, so ours does, too: ``tcp_s`` has the wish in
    it, ``tcp_transfer_s`` has not."""
    return {
        "remote_rate_to_nixl": [row["bare_s"] / row["tcp_s"] for row in rows],
        "remote_first_layer_share": [row["tcp_first_layer_s"] / row["tcp_transfer_s"] for row in rows],
    }


def nixl_figures(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Of each repeat: what is won, or lost, where NIXL carries."""
    return {
        "nixl_rate_to_bare": [row["bare_s"] / row["by_nixl_s"] for row in rows],
        "nixl_rate_to_tcp": [row["tcp_s"] / row["by_nixl_s"] for row in rows],
        "nixl_first_layer_share": [row["by_nixl_first_layer_s"] / row["by_nixl_transfer_s"] for row in rows],
        "nixl_cpu_to_tcp": [row["by_nixl_cpu_s_per_gb"] / row["tcp_cpu_s_per_gb"] for row in rows],
        **{f"{way}_cpu_s_per_gb": [row[f"{way}_cpu_s_per_gb"] for row in rows] for way in WAYS},
        **{f"{way}_mb_per_s": [NUM_PAGES * BLOCK.block_bytes / row[f"{way}_s"] / 1e6 for row in rows] for way in WAYS},
    }


if __name__ == "__main__":
    if sys.argv[1] == "lend":
        lend(int(sys.argv[2]))
    print(DESCRIBED, json.dumps(_run_here(int(sys.argv[2]))), flush=True)
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0)
