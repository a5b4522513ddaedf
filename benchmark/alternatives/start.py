# SPDX-License-Identifier: Apache-2.0
"""Starts a system: its servers, and who stands in front of them. One is up at a time, alone on the machine."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark.alternatives.systems import NO_USAGE_REPORTS, PAGE_TOKENS, LMCacheServer, System
from benchmark.router_failover import router as banyan_route
from benchmark.servers import Server, beside, free_port, wait_ready

ROUTER_PACKAGE = "sglang-router"
LMCACHE_PACKAGE = "lmcache"
BANYAN_POLICY = "lmetric"
PLUGIN_NAME = "hicache_on_cpu"


@dataclass(frozen=True)
class Running:
    """A system that answers at `url`. `start_up_s`: of its slowest server."""

    system: System
    url: str
    servers: tuple[Server, ...]

    @property
    def start_up_s(self) -> float:
        return max(server.start_up_s or 0.0 for server in self.servers)

    def memory_bytes(self) -> int:
        """Of all its servers' processes, shared pages counted once."""
        return sum(server.memory_bytes() for server in self.servers)


@contextmanager
def running(system: System, model: Path, logs: Path, kind: type[Server]) -> Iterator[Running]:
    """The system, ready to answer; ended on the way out. `kind`: real servers, or ones that are forked and up sooner.

    Raises:
        ServerFailed: when a server does not come up.
        RuntimeError: when the router in front does not.
    """
    with ExitStack() as stack:
        if system.lmcache is not None:
            stack.enter_context(lmcache_server(system.lmcache, logs / f"{system.name}-server.log"))
        servers = tuple(stack.enter_context(kind(spec, model, logs)) for spec in system.specs)
        wait_ready(servers)
        urls = [server.url for server in servers]
        url = urls[0]
        if system.front == "cache_aware":
            url = stack.enter_context(sglang_router(urls, logs / f"{system.name}-front.log"))
        elif system.front == "banyan":
            url = stack.enter_context(banyan_route(urls, BANYAN_POLICY, logs / f"{system.name}-front.log"))
        yield Running(system, url, servers)


@contextmanager
def sglang_router(urls: Sequence[str], log: Path) -> Iterator[str]:
    """SGLang's own router with the policy `cache_aware` and its defaults; its URL.

    Raises:
        RuntimeError: when the package is not installed, or the router does not come up.
    """
    _demand(ROUTER_PACKAGE)
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--policy", "cache_aware", "--worker-urls", *urls]
    url = f"http://127.0.0.1:{port}"
    with beside(command, log, f"{url}/readiness"):
        yield url


@contextmanager
def lmcache_server(server: LMCacheServer, log: Path) -> Iterator[None]:
    """LMCache's server in its multiprocess mode, with the transfers that work without a GPU.

    Raises:
        RuntimeError: when the package is not installed, or the server does not come up.
    """
    _demand(LMCACHE_PACKAGE)
    server.config.parent.mkdir(parents=True, exist_ok=True)
    server.config.write_text(f"mp_host: 127.0.0.1\nmp_port: {server.port}\n")
    http_port, size = free_port(), f"{server.dram_gib:.3f}"
    command = [
        "env",
        "=".join(NO_USAGE_REPORTS),
        sys.executable,
        "-m",
        "lmcache.cli.main",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(server.port),
    ]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--supported-transfer-mode", "auto"]
    command += ["--chunk-size", str(PAGE_TOKENS), "--l1-size-gb", size, "--l1-init-size-gb", "1"]
    command += ["--eviction-policy", "LRU"]
    with beside(command, log, f"http://127.0.0.1:{http_port}/healthcheck", timeout_s=60.0):
        yield


def _demand(package: str) -> None:
    """Raises RuntimeError when the package is not installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(f"{package} is not installed: run `make setup`") from None


def hicache_path(folder: Path) -> str:
    """A PYTHONPATH with a plugin for SGLang that is not installed, so that no other server loads it: it calls
    `sgl_kernel.hicache`, which lets HiCache run without a GPU. Written below `folder`."""
    info = folder / f"{PLUGIN_NAME}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN_NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN_NAME} = sgl_kernel.hicache:offer\n")
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(folder.absolute()), *([inherited] if inherited else [])])
