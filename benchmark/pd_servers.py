# SPDX-License-Identifier: Apache-2.0
"""Prefill servers, a decode server and a router in front of them, as child processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from banyan.cli.engine import Engine
from benchmark.servers import Server, ServerSpec, Share, cpu_env, free_port, wait_answers, wait_ready

START_TIMEOUT_S = 600.0
ROUTER_START_TIMEOUT_S = 180.0
PAIR_ARGS = (
    *("--device", "cpu", "--page-size", "16", "--context-length", "4096", "--sleep-on-idle"),
    *("--disaggregation-transfer-backend", "nixl"),
)
PAIR_ENV = (
    # Without InfiniBand, a process with a UCX backend ends in a fault of a library's destructor.
    ("UCX_MODULES", "^ib"),
    # A page outside of allocator, tree and requests ends the server.
    ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),
)


class Pair:
    """One decode server on one core, and one or more prefill servers on the other. ``store``: the folder that they
    share, for kinds that do."""

    def __init__(
        self,
        label: str,
        share: Share,
        model: Path,
        logs: Path,
        *,
        num_prefills: int = 1,
        store: Path | None = None,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
    ) -> None:
        self.label = label
        self._logs = logs
        tiers = ("--banyan-host-gb", "0.5", "--banyan-store", str(store), "--banyan-store-gb", "4") if store else ()

        def start(mode: str, number: int, args: Sequence[str]) -> Server:
            args = (*PAIR_ARGS, *tiers, "--disaggregation-mode", mode, *args)
            env = (*cpu_env(dp=1, first_core=int(mode == "decode")), *PAIR_ENV)
            return Server(ServerSpec(f"{label}-{mode}-{number}", 1, share, args, env), model, logs)

        self.prefills = [
            start("prefill", number, (*prefill_args, "--disaggregation-bootstrap-port", str(free_port())))
            for number in range(num_prefills)
        ]
        self.decode = start("decode", 0, decode_args)

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
        log = self._logs / f"{self.label}-router.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            failure = f"the router did not come up: see {log}"
            wait_answers(f"{url}/health", lambda: process.poll() is None, failure, timeout_s=ROUTER_START_TIMEOUT_S)
            yield url
        finally:
            process.terminate()
            process.wait(90)

    def state(self, server: Server) -> dict[str, Any]:
        """What Banyan tells of one of them."""
        return Engine(server.url).ranks()[0]

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
