# SPDX-License-Identifier: Apache-2.0
"""One contract for every backend of ``ports.PageStore``."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from banyan._native import SharedBytes
from banyan.ports import PageStore
from banyan.store import ChainedStore, MemoryFaults, MemoryValues, Space, open_hf3fs, open_local

pytestmark = pytest.mark.native

LAYER_BYTES = (4096, 8192)
FRAME_BYTES = sum(LAYER_BYTES)
NAMESPACE, OTHER = b"n" * 32, b"m" * 32
SPACE = Space(quota_bytes=8 << 20, share_bytes=8 << 20, floor_bytes=0)
NUM_FRAMES = 16


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def local(folder: Path) -> PageStore:
    return open_local([str(folder / "store")], NAMESPACE, LAYER_BYTES, SPACE)


def hf3fs(folder: Path) -> PageStore:
    mounts = folder / "mounts"
    mounts.write_text(f"hf3fs.cluster {folder} fuse.hf3fs rw 0 0\n")
    return open_hf3fs([str(folder / "store")], NAMESPACE, LAYER_BYTES, SPACE, mounts)


def memory_store(_folder: Path) -> PageStore:
    return ChainedStore(MemoryValues(), NAMESPACE, FRAME_BYTES)


@pytest.fixture(scope="module")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master on two free loopback ports."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        port, metrics = first.getsockname()[1], second.getsockname()[1]
    program = shutil.which("mooncake_master") or str(Path(sys.executable).parent / "mooncake_master")
    command = [program, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    log = tmp_path_factory.mktemp("mooncake") / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, f"--metrics_port={metrics}"], stdout=out, stderr=subprocess.STDOUT)
    time.sleep(2)
    assert process.poll() is None, log.read_text()[-2000:]
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(params=["local", "hf3fs", "memory", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PageStore]:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
        from banyan.store.mooncake import MooncakeValues

        master = request.getfixturevalue("mooncake_master")
        values = MooncakeValues(master, segment_bytes=64 << 20, buffer_bytes=16 << 20)
        opened: PageStore = ChainedStore(values, hashlib.sha256(str(tmp_path).encode()).digest(), FRAME_BYTES)
    else:
        makers: dict[str, Callable[[Path], PageStore]] = {"local": local, "hf3fs": hf3fs, "memory": memory_store}
        opened = makers[request.param](tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def memory() -> SharedBytes:
    memory = SharedBytes.create(NUM_FRAMES * FRAME_BYTES, "arena")
    words = np.frombuffer(memory, dtype=np.uint64)
    words[:] = np.random.default_rng(3).integers(0, 1 << 63, len(words), dtype=np.uint64)
    return memory


def frame(memory: SharedBytes, number: int) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME_BYTES)[number]


def fetch(store: Any, memory: SharedBytes, numbers: list[int], first_frame: int) -> list[tuple[int, str]]:
    found = store.lookup(keys(*numbers))
    assert found.num_pages == len(numbers)
    targets = offsets(*range(first_frame, first_frame + len(numbers)))
    read = store.read(found, len(numbers), memory, targets)
    failed = read.finish()
    assert read.has_ended
    return failed


def test_pages_when_stored_then_found_and_read_back(store: PageStore, memory: SharedBytes) -> None:
    assert store.put(keys(0, 1, 2), None, memory, offsets(0, 1, 2)) == ["queued"] * 3
    assert store.sync() == 0
    assert sorted(store.completed()) == sorted((name, "stored") for name in keys(0, 1, 2))
    assert store.completed() == []
    assert store.lookup(keys(0, 1, 9)).num_pages == 2
    assert fetch(store, memory, [0, 1, 2], 8) == []
    for number in range(3):
        assert (frame(memory, number) == frame(memory, 8 + number)).all()


def test_put_when_repeated_or_without_its_parent_then_said_so(store: PageStore, memory: SharedBytes) -> None:
    assert store.put(keys(1), key(0), memory, offsets(1)) == ["orphan"]
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    assert store.put(keys(0, 1), None, memory, offsets(0, 1)) == ["present", "queued"]
    assert store.sync() == 0
    assert store.lookup(keys(0, 1)).num_pages == 2


def test_writes_when_paused_then_none_until_sync(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    time.sleep(0.05)
    assert store.completed() == []
    assert store.sync() == 0
    assert len(store.completed()) == 2
    store.open_writes()


def test_evict_when_a_page_has_children_then_they_go_first(store: PageStore, memory: SharedBytes) -> None:
    store.put(keys(0, 1, 2), None, memory, offsets(0, 1, 2))
    store.sync()
    assert store.evict(1) == 1
    # Mooncake lets a value stay while its lease lasts; then nothing has gone yet, and nothing is wrong.
    assert store.lookup(keys(0, 1)).num_pages == 2


def test_namespace_when_invalidated_then_nothing_is_found(store: PageStore, memory: SharedBytes) -> None:
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    before = store.lookup(keys(0))
    store.invalidate(OTHER)
    assert store.lookup(keys(0)).num_pages == 0
    assert store.read(before, 1, memory, offsets(5)).finish() == [(0, "gone")]


def test_close_when_repeated_then_harmless(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0), None, memory, offsets(0))
    store.close()
    assert [name for name, _ in store.completed()] == keys(0), "every frame comes back"


@pytest.mark.parametrize("faults", [MemoryFaults(flip=3), MemoryFaults(eio=3), MemoryFaults(lose=3)])
def test_values_when_they_lie_then_every_page_is_right_or_named(faults: MemoryFaults, memory: SharedBytes) -> None:
    store = ChainedStore(MemoryValues(faults), NAMESPACE, FRAME_BYTES)
    num_failed = 0
    for number in range(8):
        store.put(keys(number), None, memory, offsets(number))
    num_failed += store.sync()
    for number in range(8):
        if store.lookup(keys(number)).num_pages == 0:
            continue
        failed = fetch(store, memory, [number], 8)
        num_failed += len(failed)
        assert failed or (frame(memory, number) == frame(memory, 8)).all()
    assert num_failed > 0
    store.close()


def test_hf3fs_when_the_path_is_on_another_file_system_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on no mounted 3FS"):
        open_hf3fs([str(tmp_path)], NAMESPACE, LAYER_BYTES, SPACE)
