# SPDX-License-Identifier: Apache-2.0
"""Two servers of one rank and one compute thread each; the second one asks the first for prefixes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark.engine import Engine
from benchmark.measure import flush_cache
from benchmark.processor import CPU_ENGINE
from benchmark.servers import Server, ServerSpec, cpu_env, free_port, wait_ready, write_secret

HOST = "127.0.0.1"
NUM_OUTPUT_TOKENS = 16
PATIENCE_S = 120.0
FLAGS = (*CPU_ENGINE, "--max-total-tokens", "24000", "--sleep-on-idle", "--banyan-host-gb", "1")
# A page outside of allocator, tree and requests ends the server.
CHECKED = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
# Which SGLang would ask the network for.
HOST_IP = ("SGLANG_HOST_IP", HOST)


def is_heard(borrower: Engine, lender: Engine) -> bool:
    """Whether one borrows from the other now, by NIXL where that is their carrier."""
    node, page_server = borrower.ranks()[0]["nodes"], lender.ranks()[0]["page_server"]
    return node["num_listening"] == 1 and node.get("num_nixl_ready", 1) == 1 and page_server.get("has_nixl", True)


class Nodes:
    """The two servers. ``kind``: how each of them is started; ``flags``: of both; ``by_way_of``: the host under which
    the second one knows the first; ``choose_port``: of the first one's page server, which takes the next port too;
    ``cores``: where all threads of each stay, as taskset(1) lists them; None: they run where the system puts them;
    ``env``: of both."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        kind: type[Server] = Server,
        flags: Sequence[str] = (),
        by_way_of: str = HOST,
        choose_port: Callable[[], int] = free_port,
        cores: tuple[str, str] | None = None,
        env: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._model, self._logs, self._kind = model, folder / "logs", kind
        secret = write_secret(folder / "secret")
        self.page_server_port = choose_port()

        def spec(label: str, core: int, *more: str) -> ServerSpec:
            own = (*FLAGS, "--banyan-secret-file", str(secret), *flags, *more)
            own_env = (*cpu_env(dp=1, first_core=core), CHECKED, HOST_IP, *env)
            return ServerSpec(label, 1, "on", own, own_env, None if cores is None else cores[core])

        self._specs = [
            spec("lender", 0, "--banyan-listen", f"{HOST}:{self.page_server_port}"),
            spec("borrower", 1, "--banyan-peers", f"{by_way_of}:{self.page_server_port}"),
        ]
        self._servers = [self._begin(spec) for spec in self._specs]
        self.lender, self.borrower = (Engine(server.url) for server in self._servers)

    def _begin(self, spec: ServerSpec) -> Server:
        return self._kind(spec, self._model, self._logs)

    def __enter__(self) -> Nodes:
        wait_ready(self._servers)
        self.hear_lender()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.stop()

    def lend(self, ids: Sequence[int]) -> list[int]:
        """The first server's answer, once the prompt lies in its arena."""
        before = self.lender.ranks()[0]["backed_up_pages"]
        output = self.lender.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"]
        self._until(lambda: self.lender.ranks()[0]["backed_up_pages"] >= before + len(ids) // 16)
        return list(output)

    @property
    def lender_url(self) -> str:
        return self._servers[0].url

    def pulled_bytes(self) -> int:
        """That the second server has taken from the first."""
        return int(self.borrower.ranks()[0]["pull_bytes"])

    def forget_at_borrower(self) -> None:
        """Empty the second server's pool and arena."""
        asyncio.run(flush_cache(self._servers[1].url))

    def hear_lender(self) -> None:
        """Until the second server hears the first, and, where that is its carrier, reads there by NIXL."""
        self._until(lambda: is_heard(self.borrower, self.lender))

    def stop_lender(self) -> None:
        """From now on it does nothing, and keeps all that it has."""
        self._servers[0].asleep()

    def wake_lender(self) -> None:
        self._servers[0].awake()
        self.hear_lender()

    def kill_lender(self) -> None:
        self._servers[0].kill()

    def start_lender_again(self) -> None:
        """Another one in its place, with nothing in its arena."""
        self._servers[0] = self._begin(self._specs[0])
        wait_ready(self._servers[:1])
        self.lender = Engine(self._servers[0].url)
        self.hear_lender()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the servers do not come to it")
            time.sleep(0.2)
