# SPDX-License-Identifier: Apache-2.0
"""One contract for every backend of ``ports.PageStore``."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from banyan._native import SharedBytes
from banyan.ports import PageStore
from banyan.store import BACKENDS, Space, StoreLocation, backends, open_store

LAYER_BYTES = (4096, 8192)
FRAME_BYTES = sum(LAYER_BYTES)
NAMESPACE, OTHER = b"n" * 32, b"m" * 32
SPACE = Space(quota_bytes=8 << 20, share_bytes=4 << 20, floor_bytes=0)
NUM_FRAMES = 16


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def opened(url: str) -> PageStore:
    location = StoreLocation.parse(url.split(","))
    return open_store(location, namespace=NAMESPACE, layer_bytes=LAYER_BYTES, space=SPACE)


@pytest.fixture(params=sorted(BACKENDS))
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a store that is not there yet. 3FS is a folder that is said to be mounted as one."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"hf3fs.cluster {tmp_path} fuse.hf3fs rw 0 0\n")
    monkeypatch.setattr(backends, "MOUNTS", mounts)
    return f"{request.param}://{tmp_path / 'a'},{tmp_path / 'b'}"


@pytest.fixture
def store(url: str) -> Iterator[PageStore]:
    store = opened(url)
    yield store
    store.close()


@pytest.fixture
def memory() -> SharedBytes:
    memory = SharedBytes.create(NUM_FRAMES * FRAME_BYTES, "arena")
    words = np.frombuffer(memory, dtype=np.uint64)
    words[:] = np.random.default_rng(3).integers(0, 1 << 63, len(words), dtype=np.uint64)
    return memory


def frame(memory: SharedBytes, number: int) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME_BYTES)[number]


def fetch(store: PageStore, memory: SharedBytes, numbers: list[int], first_frame: int) -> list[tuple[int, str]]:
    found = store.lookup(keys(*numbers))
    assert found.num_pages == len(numbers)
    targets = offsets(*range(first_frame, first_frame + len(numbers)))
    read = store.read(found, len(numbers), memory, targets, layers_per_step=1)
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
    assert store.lookup(keys(0, 1, 2)).num_pages == 2


def test_namespace_when_invalidated_then_nothing_is_found(store: PageStore, memory: SharedBytes) -> None:
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    before = store.lookup(keys(0))
    store.invalidate(OTHER)
    assert store.lookup(keys(0)).num_pages == 0
    assert store.read(before, 1, memory, offsets(5), layers_per_step=1).finish() == [(0, "gone")]


def test_close_when_repeated_then_harmless(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0), None, memory, offsets(0))
    store.close()
    assert [name for name, _ in store.completed()] == keys(0), "every frame comes back"


def test_store_when_opened_again_then_what_was_stored_is_found(url: str, memory: SharedBytes) -> None:
    first = opened(url)
    first.put(keys(0, 1), None, memory, offsets(0, 1))
    assert first.sync() == 0
    first.close()
    again = opened(url)
    assert fetch(again, memory, [0, 1], 8) == []
    assert (frame(memory, 1) == frame(memory, 9)).all()
    again.close()


def test_store_when_another_writer_comes_and_goes_then_each_finds_the_others_pages(
    url: str, memory: SharedBytes
) -> None:
    one, other = opened(url), opened(url)
    one.put(keys(0), None, memory, offsets(0))
    one.sync()
    deadline = time.monotonic() + 10
    while other.lookup(keys(0)).num_pages == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other.put(keys(0, 1), None, memory, offsets(0, 1)) == ["present", "queued"]
    one.close()
    assert other.sync() == 0
    assert fetch(other, memory, [0, 1], 8) == []
    assert other.stats() and other.engine
    other.close()


def test_location_when_parsed_then_plain_paths_are_files() -> None:
    assert StoreLocation.parse(("/a", "b")) == StoreLocation("file", ("/a", "b"))
    assert StoreLocation.parse(("file:///a", "/b")) == StoreLocation("file", ("/a", "/b"))
    assert str(StoreLocation.parse(("3fs:///mnt/kv",))) == "3fs:///mnt/kv"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "no folder"),
        (("file://a",), "folders are absolute"),
        (("/a", "file:///b"), "one scheme for all"),
        (("file:///a", "b"), "folders are absolute"),
    ],
)
def test_location_when_it_is_none_then_refused_with_the_way_out(parts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StoreLocation.parse(parts)


def test_store_when_nobody_has_its_scheme_then_the_schemes_are_said() -> None:
    with pytest.raises(ValueError, match="use one of 3fs, file"):
        opened("s3:///bucket")


def test_hf3fs_when_the_path_is_on_another_file_system_then_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on no mounted 3FS"):
        opened(f"3fs://{tmp_path}")
