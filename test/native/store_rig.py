# SPDX-License-Identifier: Apache-2.0
"""Real stores for the contract of ``ports.PageStore``, and pages to put into them."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from banyan._native import SharedBytes
from banyan.ports import PageStore, StoreFound
from banyan.store import Space, StoreLocation, asked_store, backends, open_store

LAYER_BYTES = (4096, 28672)
FRAME_BYTES = sum(LAYER_BYTES)
NUM_FRAMES = 16
QUOTA_BYTES = 8 << 20
SPACE = Space(quota_bytes=QUOTA_BYTES, share_bytes=4 << 20, floor_bytes=0)
LENT_BYTES = 16 << 20
CLIENT_TTL_S = 2


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def filled(seed: int = 3) -> SharedBytes:
    """Frames of noise."""
    memory = SharedBytes.create(NUM_FRAMES * FRAME_BYTES, "arena")
    words = np.frombuffer(memory, dtype=np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), dtype=np.uint64)
    return memory


def frame(memory: SharedBytes, number: int) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME_BYTES)[number]


def until(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def found(store: PageStore, wanted: list[str]) -> StoreFound:
    """What it holds, as a server finds out: one that has to be asked is asked."""
    asked = asked_store(store)
    if asked is not None:
        number = asked.ask(wanted)
        assert number is not None
        over: list[tuple[int, Any]] = []
        until(lambda: bool(over.extend(asked.answers()) or over))
        assert [said for said, _ in over] == [number]
    return store.lookup(wanted)


def fetch(store: PageStore, memory: SharedBytes, numbers: list[int], first_frame: int, step: int = 1) -> list[Any]:
    """Read pages into the frames from ``first_frame`` on; those that failed."""
    pages = found(store, keys(*numbers))
    assert pages.num_pages == len(numbers)
    targets = offsets(*range(first_frame, first_frame + len(numbers)))
    read = store.read(pages, len(numbers), memory, targets, layers_per_step=step)
    failed = read.finish()
    assert read.has_ended
    return failed


@dataclass
class Place:
    """A store that is not there yet."""

    url: str
    folder: Path
    mounts: Path
    namespace: bytes
    damage: Callable[[], None] = field(default=lambda: None)

    def open(self, namespace: bytes = b"") -> PageStore:
        backends.MOUNTS = self.mounts
        location = StoreLocation.parse(self.url.split(","))
        return open_store(location, namespace=namespace or self.namespace, layer_bytes=LAYER_BYTES, space=SPACE)

    @property
    def is_on_disk(self) -> bool:
        return not self.url.startswith("mooncake")

    def held_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def flip(self) -> None:
        """Flip a bit in every 4 KiB of every file but those that say what is where."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.stat().st_size >= FRAME_BYTES and not path.name.startswith("manifest"):
                with path.open("r+b") as file:
                    for start in range(8 << 10, path.stat().st_size, 4096):
                        file.seek(start)
                        byte = file.read(1)
                        file.seek(start)
                        file.write(bytes([byte[0] ^ 1]))


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def program(name: str) -> str:
    """Of Mooncake's package: beside the interpreter, or in the package itself."""
    import mooncake

    return str(Path(mooncake.__file__).with_name(name))


class Mooncake:
    """A master, and a client that lends it memory, on the loopback interface."""

    def __init__(self, logs: Path, *, lent_bytes: int = LENT_BYTES, ttl_s: int = CLIENT_TTL_S) -> None:
        self._logs = logs
        self.port, metrics, self._client_port = free_ports(3)
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"mooncake://{self.host}"
        local = ("--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1")
        lease = ("--default_kv_lease_ttl=1s",)
        self.master = self._start(
            "mooncake_master", *local, f"--metrics_port={metrics}", f"--client_ttl={ttl_s}", *lease
        )
        until(self._is_listening)
        self.lender = self.lend(lent_bytes) if lent_bytes else None

    def _is_listening(self) -> bool:
        assert self.master.poll() is None, "the master has ended: see its log"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def lend(self, num_bytes: int) -> subprocess.Popen[bytes]:
        where = ("--host=127.0.0.1", f"--master_server_address={self.host}", "--metadata_server=P2PHANDSHAKE")
        size = (f"--global_segment_size={num_bytes}", f"--port={self._client_port}")
        return self._start("mooncake_client", *where, *size)

    def _start(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen([program(name), *flags], stdout=log, stderr=subprocess.STDOUT)

    def client(self) -> Any:
        """A client of Mooncake's own, that lends nothing."""
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.host) == 0
        return store

    def close(self) -> None:
        for process in (self.lender, self.master):
            if process is not None:
                process.kill()
                process.wait()


def main(url: str, namespace: str, mounts: str, *numbers: str) -> None:
    """A server's process: stores some pages, says so, and stays until it is killed or its input ends."""
    place = Place(url, Path(), Path(mounts), bytes.fromhex(namespace))
    store, memory, wanted = place.open(), filled(), [int(number) for number in numbers]
    assert store.put(keys(*wanted), None, memory, offsets(*wanted)) == ["queued"] * len(wanted)
    assert store.sync() == 0
    print("stored", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
