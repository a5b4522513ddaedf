# SPDX-License-Identifier: Apache-2.0
"""A Mooncake store on the loopback interface: its master, and a client that lends it memory."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from benchmark.processes import ProcessSession
from benchmark.servers import free_port

HOST = "127.0.0.1"
PATIENCE_S = 20.0


def program(name: str) -> str:
    """Of Mooncake's package: in the package itself, where no script of Python's stands before it."""
    import mooncake

    return str(Path(mooncake.__file__).with_name(name))


def gauge(metrics: str, name: str) -> float:
    """One value of Prometheus' text.

    Raises:
        LookupError: when it is not there.
    """
    for line in metrics.splitlines():
        found, _, value = line.rpartition(" ")
        if found == name:
            return float(value)
    raise LookupError(f"no {name} in the metrics")


class Mooncake:
    """The two processes, each the leader of a session. ``ttl_s``: how long the master knows a client that says
    nothing; ``flags``: more of the master's. No bytes lent: no client."""

    def __init__(self, logs: Path, *, lent_bytes: int, ttl_s: int, flags: tuple[str, ...] = ()) -> None:
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.port, self._metrics_port, self._client_port = free_port(), free_port(), free_port()
        self.host = f"{HOST}:{self.port}"
        self.url = f"mooncake://{self.host}"
        where = (f"--rpc_address={HOST}", f"--rpc_port={self.port}")
        metrics = (f"--metrics_host={HOST}", f"--metrics_port={self._metrics_port}")
        self.master = self._start("mooncake_master", *where, *metrics, f"--client_ttl={ttl_s}", *flags)
        self._wait_listening()
        self.lender = self.lend(lent_bytes) if lent_bytes else None

    def _wait_listening(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._is_listening():
            if self.master.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                raise RuntimeError(f"Mooncake's master does not come up: see {self._logs / 'mooncake_master.log'}")
            time.sleep(0.01)

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def lend(self, num_bytes: int) -> subprocess.Popen[bytes]:
        where = (f"--host={HOST}", f"--master_server_address={self.host}", "--metadata_server=P2PHANDSHAKE")
        size = (f"--global_segment_size={num_bytes}", f"--port={self._client_port}")
        return self._start("mooncake_client", *where, *size)

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [program(name), *flags], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in (self.lender, self.master) if process is not None]

    def sessions(self) -> list[ProcessSession]:
        return [ProcessSession(process.pid) for process in self._processes()]

    def bytes_per_value(self) -> float:
        """Memory that a value takes of what was lent, as the master counts."""
        with urllib.request.urlopen(f"http://{HOST}:{self._metrics_port}/metrics", timeout=PATIENCE_S) as answer:
            metrics = answer.read().decode()
        return gauge(metrics, "master_allocated_bytes") / gauge(metrics, "master_key_count")

    def kill_lender(self) -> None:
        if self.lender is not None:
            self.lender.kill()
            self.lender.wait()

    def close(self) -> None:
        for process in self._processes():
            process.kill()
            process.wait()
