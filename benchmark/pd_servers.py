# SPDX-License-Identifier: Apache-2.0
"""Prefill servers, a decode server and a router in front of them, as child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.engine import Engine
from benchmark.processor import CPU_ENGINE
from benchmark.servers import Server, ServerSpec, Share, beside, cpu_env, free_port, wait_ready

PAGE_TOKENS = 16
START_TIMEOUT_S = 600.0
ROUTER_START_TIMEOUT_S = 180.0
SERVER_ARGS = (*CPU_ENGINE, "--page-size", str(PAGE_TOKENS), "--context-length", "4096", "--sleep-on-idle")
PAIR_ENV = (
    # Mooncake would look for RDMA.
    ("MC_FORCE_TCP", "1"),
    # Without InfiniBand, a process with a UCX backend ends in a fault of a library's destructor.
    ("UCX_MODULES", "^ib"),
    # A page outside of allocator, tree and requests ends the server.
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
    # SGLang opens NCCL for every group of more than one process, on a CPU too, where it has no device to use.
    ("SGLANG_NCCL_SO_PATH", "/nonexistent"),
)


class Pair:
    """One decode server, and one or more prefill servers, with a compute thread a rank. ``store``: the folder that they
    share, for kinds that do. ``prefill_ranks``: for each prefill server how many ranks it has; ``num_shards``: of each
    rank; ``transfer``: what carries the hand-over; ``kind``: how each of them is started."""

    def __init__(
        self,
        label: str,
        share: Share,
        model: Path,
        logs: Path,
        *,
        prefill_ranks: Sequence[int] = (1,),
        decode_ranks: int = 1,
        num_shards: int = 1,
        transfer: str = "nixl",
        store: Path | None = None,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        env: Sequence[tuple[str, str]] = (),
        kind: type[Server] = Server,
    ) -> None:
        self.label = label
        self._kind = kind
        self._model = model
        self._logs = logs
        tiers = ("--banyan-host-gb", "0.5", "--banyan-store", str(store), "--banyan-store-gb", "4") if store else ()

        def start(mode: str, number: int, num_ranks: int, args: Sequence[str]) -> Server:
            role = ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", transfer)
            args = (*SERVER_ARGS, *tiers, *role, "--tp", str(num_shards), *args)
            num_processes = num_ranks * num_shards
            first_core = int(mode == "decode" and num_processes == 1)
            variables = (*cpu_env(dp=num_processes, first_core=first_core), *PAIR_ENV, *env)
            return kind(ServerSpec(f"{label}-{mode}-{number}", num_ranks, share, args, variables), model, logs)

        self.prefills = [
            start("prefill", number, num_ranks, (*prefill_args, "--disaggregation-bootstrap-port", str(free_port())))
            for number, num_ranks in enumerate(prefill_ranks)
        ]
        self.decode = start("decode", 0, decode_ranks, decode_args)

    @property
    def servers(self) -> list[Server]:
        return [*self.prefills, self.decode]

    @contextmanager
    def routed(self, *flags: str) -> Iterator[str]:
        """A router in front of them; its URL, once it takes requests."""
        port = free_port()
        command = [sys.executable, "-m", "banyan.cli", "route", "--port", str(port), *flags]
        for server in self.prefills:
            command += ["--prefill", server.url]
        command += ["--decode", self.decode.url]
        log = self._logs / f"{self.label}-router-{port}.log"
        url = f"http://127.0.0.1:{port}"
        with beside(command, log, f"{url}/health", timeout_s=ROUTER_START_TIMEOUT_S):
            yield url

    def states(self, server: Server) -> list[dict[str, Any]]:
        """What Banyan tells of the ranks of one of them."""
        return list(Engine(server.url).ranks().values())

    def total(self, server: Server, name: str) -> int:
        """One of these numbers, over its ranks."""
        return sum(state[name] for state in self.states(server))

    def start_decode_again(self) -> None:
        """Another decode server in the place of one that has ended; wait for it with ``wait_ready``."""
        spec = self.decode.spec
        again = replace(spec, label=f"{spec.label}-again")
        self.decode = self._kind(again, self._model, self._logs, port=self.decode.port)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Pair:
        try:
            wait_ready(self.servers, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
