# SPDX-License-Identifier: Apache-2.0
"""Others that store the same blocks: each put is durable when it returns, each get is cold.

None of them is told to do more than that: no checksums, no quota, no eviction.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from banyan_lab.bench.store.blocks import Blocks

BATCH = 32
"""Blocks in one transaction."""


class Peer(Protocol):
    name: str

    def put_s(self) -> float: ...

    def get_s(self) -> float: ...

    def close(self) -> None: ...


def open_peers(blocks: Blocks, place: Path) -> tuple[list[Peer], dict[str, str]]:
    """Those that are installed, and why the others are missing."""
    makers: dict[str, Callable[[Blocks, Path], Peer]] = {
        "sglang file backend": SglangFiles,
        "lmdb": Lmdb,
        "rocksdb": RocksDb,
        "nixl posix": NixlPosix,
    }
    peers, missing = [], {}
    for name, maker in makers.items():
        try:
            peers.append(maker(blocks, place / name.replace(" ", "-")))
        except ImportError as error:
            missing[name] = f"{error} (pip install --no-deps -r requirements/store.txt)"
    return peers, missing


def drop_cache(folder: Path) -> None:
    """Take the clean pages of every file below out of the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Lmdb:
    """One transaction for each batch, synced by LMDB at its commit."""

    name = "lmdb"

    def __init__(self, blocks: Blocks, folder: Path) -> None:
        import lmdb

        self._lmdb = lmdb
        self._blocks, self._folder = blocks, folder
        self._keys: list[str] = []

    def _open(self) -> Any:
        return self._lmdb.open(str(self._folder), map_size=8 * self._blocks.shape.num_bytes, readahead=False)

    def put_s(self) -> float:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keys = self._blocks.fresh_keys()
        with self._open() as environment:
            start = time.perf_counter()
            for first in range(0, len(self._keys), BATCH):
                with environment.begin(write=True) as transaction:
                    for index in range(first, min(first + BATCH, len(self._keys))):
                        transaction.put(self._keys[index].encode(), memoryview(self._blocks.sources[index]))
            return time.perf_counter() - start

    def get_s(self) -> float:
        drop_cache(self._folder)
        self._blocks.forget_targets()
        with self._open() as environment, environment.begin(buffers=True) as transaction:
            start = time.perf_counter()
            for index in self._blocks.order:
                memoryview(self._blocks.targets[index])[:] = transaction.get(self._keys[index].encode())
            taken = time.perf_counter() - start
        self._blocks.check_targets()
        return taken

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class RocksDb:
    """Values in blob files, one write batch for each batch, its log synced."""

    name = "rocksdb"

    def __init__(self, blocks: Blocks, folder: Path) -> None:
        import rocksdict

        self._rocksdict = rocksdict
        self._blocks, self._folder = blocks, folder
        self._keys: list[str] = []

    def _open(self) -> Any:
        options = self._rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        return self._rocksdict.Rdict(str(self._folder), options)

    def put_s(self) -> float:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keys = self._blocks.fresh_keys()
        database = self._open()
        synced = self._rocksdict.WriteOptions()
        synced.sync = True
        start = time.perf_counter()
        for first in range(0, len(self._keys), BATCH):
            batch = self._rocksdict.WriteBatch(raw_mode=True)
            for index in range(first, min(first + BATCH, len(self._keys))):
                batch.put(self._keys[index].encode(), self._blocks.sources[index].tobytes())
            database.write(batch, synced)
        taken = time.perf_counter() - start
        database.close()
        return taken

    def get_s(self) -> float:
        drop_cache(self._folder)
        self._blocks.forget_targets()
        database = self._open()
        start = time.perf_counter()
        for index in self._blocks.order:
            memoryview(self._blocks.targets[index])[:] = database.get(self._keys[index].encode())
        taken = time.perf_counter() - start
        database.close()
        self._blocks.check_targets()
        return taken

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class NixlPosix:
    """One transfer of all blocks to one file with O_DIRECT: no index, no checks."""

    name = "nixl posix"

    def __init__(self, blocks: Blocks, file: Path) -> None:
        # Its log goes to stdout as that is when it is imported, and stdout is for the figures.
        with contextlib.redirect_stdout(sys.stderr):
            from nixl._api import nixl_agent, nixl_agent_config

        shape = blocks.shape
        self._blocks = blocks
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, shape.num_bytes)
        self._agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true"})
        base = blocks.frames.ctypes.data
        self._agent.register_memory([(base, 2 * shape.num_bytes, 0, "")], mem_type="DRAM")
        self._agent.register_memory([(0, shape.num_bytes, self._fd, "")], mem_type="FILE")
        sizes = range(0, shape.num_bytes, shape.block_bytes)
        self._file = [(at, shape.block_bytes, self._fd) for at in sizes]
        self._sources = [(base + at, shape.block_bytes, 0) for at in sizes]
        self._targets = [(base + shape.num_bytes + at, shape.block_bytes, 0) for at in sizes]
        self.put_s()

    def _move(self, operation: str, memory: list[tuple[int, int, int]]) -> None:
        order = self._blocks.order
        local = self._agent.get_xfer_descs([memory[index] for index in order], mem_type="DRAM")
        remote = self._agent.get_xfer_descs([self._file[index] for index in order], mem_type="FILE")
        transfer = self._agent.initialize_xfer(operation, local, remote, "bench")
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL {operation} ended as {state}")
        self._agent.release_xfer_handle(transfer)

    def put_s(self) -> float:
        start = time.perf_counter()
        self._move("WRITE", self._sources)
        os.fdatasync(self._fd)
        return time.perf_counter() - start

    def get_s(self) -> float:
        self._blocks.forget_targets()
        start = time.perf_counter()
        self._move("READ", self._targets)
        taken = time.perf_counter() - start
        self._blocks.check_targets()
        return taken

    def close(self) -> None:
        os.close(self._fd)


class SglangFiles:
    """SGLang's own file backend, in a process of its own: only the plugin imports SGLang."""

    name = "sglang file backend"

    def __init__(self, blocks: Blocks, folder: Path) -> None:
        import importlib.util

        if importlib.util.find_spec("sglang") is None:
            raise ImportError("sglang is not installed")
        shape = blocks.shape
        command = [sys.executable, "-m", "banyan_lab.bench.store.sglang_files", folder]
        self._process = subprocess.Popen(
            [*map(str, command), str(shape.num_blocks), str(shape.block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask("ready")

    def _ask(self, what: str) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return float(json.loads(line)["seconds"])
        raise RuntimeError(f"SGLang's file backend ended at {what!r}")

    def put_s(self) -> float:
        return self._ask("put")

    def get_s(self) -> float:
        return self._ask("get")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
