# SPDX-License-Identifier: Apache-2.0
"""The binding of the native store: what crosses, and what is refused. The store itself is tested in Rust."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from banyan._native import SharedBytes, Store, store_check, store_repair, store_survey
from banyan.layout.file_digests import MEMORY_NAME

LAYER_BYTES = [4096, 8192]
FRAME_BYTES = 12288
NAMESPACE = b"n" * 32


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def open_store(path: Path, **options) -> Store:
    return Store.open([str(path)], NAMESPACE, LAYER_BYTES, **{"quota_bytes": 4 << 20, "floor_bytes": 0, **options})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def memory() -> SharedBytes:
    memory = SharedBytes.create(8 * FRAME_BYTES, "arena")
    np.frombuffer(memory, dtype=np.uint32)[:] = np.arange(8 * FRAME_BYTES // 4)
    return memory


def shared_maps() -> set[tuple[str, int]]:
    """What this process has mapped to write and to share: path, and bytes."""
    maps = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    shared = [(line[5], line[0].split("-")) for line in maps if line[1] == "rw-s" and len(line) > 5]
    return {(path, int(end, 16) - int(start, 16)) for path, (start, end) in shared}


def test_memory_when_a_store_maps_a_file_to_write_then_no_drive_that_is_full_takes_it_away(tmp_path: Path) -> None:
    before = shared_maps()
    store = open_store(tmp_path / "store")
    mine = {
        path: num_bytes for path, num_bytes in shared_maps() - before if path.startswith("/") and "anon" not in path
    }
    assert len(mine) == 1
    for path, num_bytes in mine.items():
        # A write to a page without a block, where none is left, ends the process (SIGBUS).
        assert path.startswith("/dev/shm/"), path
        assert os.stat(path).st_blocks * 512 >= num_bytes
    store.close()


LOCK_AND_STOP = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_lock_when_its_holder_is_stopped_then_reads_go_on_waits_end_and_an_opening_says_who_has_it(
    tmp_path: Path, memory: SharedBytes
) -> None:
    store = open_store(tmp_path / "store", stall_s=0.5, segment_bytes=64 << 10)
    store.put(keys(1, 2), None, memory, offsets(0, 1))
    store.sync()
    command = [sys.executable, "-c", LOCK_AND_STOP, str(tmp_path / "store" / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        try:
            # More than its segment has places for.
            store.put(keys(*range(10, 18)), None, memory, offsets(*range(8)))
            started_s = time.monotonic()
            with pytest.raises(TimeoutError, match="has not taken"):
                store.sync()
            assert time.monotonic() - started_s < 10
            assert store.read(store.lookup(keys(1)), 1, memory, offsets(7)).finish() == []
            assert store.stats()["stalls"] == 0 and store.stats()["sync_timeouts"] == 1
            with pytest.raises(TimeoutError, match=rf"locked by process {holder.pid} .*end it"):
                open_store(tmp_path / "store")
        finally:
            holder.kill()
    store.close()


def test_pages_when_put_then_read_into_other_frames(store: Store, memory: SharedBytes) -> None:
    store.register(memory)
    assert store.put(keys(1, 2), None, memory, offsets(0, 1)) == ["queued", "queued"]
    assert store.sync() == 0
    assert sorted(store.completed()) == sorted((name, "stored") for name in keys(1, 2))
    found = store.lookup(keys(1, 2, 3))
    read = store.read(found, 2, memory, offsets(5, 4))
    assert read.finish() == []
    assert (found.num_pages, read.bytes_read) == (2, 2 * FRAME_BYTES)
    frames = np.frombuffer(memory, dtype=np.uint8).reshape(8, FRAME_BYTES)
    assert (frames[5] == frames[0]).all() and (frames[4] == frames[1]).all()
    assert np.frombuffer(read.offsets([1, 0]), dtype=np.int64).tolist() == offsets(4, 5).tolist()
    with pytest.raises(ValueError, match="page 2 of a read of 2 pages"):
        read.offsets([2])


def test_put_when_the_parent_is_named_then_the_chain_goes_on(store: Store, memory: SharedBytes) -> None:
    assert store.put(keys(2), key(1), memory, offsets(0)) == ["orphan"]
    assert store.put(keys(1), None, memory, offsets(0)) == ["queued"]
    assert store.put(keys(2), key(1), memory, offsets(1)) == ["queued"]
    store.sync()
    assert store.put(keys(1, 2), None, memory, offsets(0, 1)) == ["present", "present"]


def test_writes_when_they_are_paused_then_they_wait_until_they_are_let_go(store: Store, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(1, 2, 3), None, memory, offsets(0, 1, 2))
    time.sleep(0.02)
    assert store.stats()["written_pages"] == 0
    store.open_writes()
    while store.stats()["written_pages"] < 3:
        pass
    assert store.stats()["backlog_pages"] == 0


def test_read_when_dropped_then_nothing_is_written_afterwards(store: Store, memory: SharedBytes) -> None:
    store.put(keys(1), None, memory, offsets(0))
    store.sync()
    read = store.read(store.lookup(keys(1)), 1, memory, offsets(1))
    del read
    frame = np.frombuffer(memory, dtype=np.uint8)[FRAME_BYTES : 2 * FRAME_BYTES]
    frame[:] = 7
    time.sleep(0.02)
    assert (frame == 7).all()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [([100], "not a multiple of 4096"), ([-4096], "is negative"), ([1 << 30], "not inside"), ([0, 0], "1 pages")],
)
def test_read_when_the_frames_are_wrong_then_valueerror(store, memory, frames, reason: str) -> None:
    store.put(keys(1), None, memory, offsets(0))
    store.sync()
    with pytest.raises(ValueError, match=reason):
        store.read(store.lookup(keys(1)), 1, memory, np.array(frames, dtype=np.int64))


def test_open_when_the_engine_is_unknown_then_valueerror_names_the_choice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose auto or threads"):
        open_store(tmp_path / "store", engine="aio")


def test_open_when_the_directory_is_foreign_then_valueerror_names_it(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"letter\.txt.*choose an empty directory"):
        open_store(tmp_path)


def test_open_when_the_weights_were_digested_before_then_the_directory_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / MEMORY_NAME).write_text("{}")
    open_store(tmp_path).close()
    assert (tmp_path / "STORE").exists() and (tmp_path / MEMORY_NAME).read_text() == "{}"


GROW_IN_VAIN = """
import sys
import numpy as np
from banyan._native import SharedBytes, Store
memory = SharedBytes.create(4096, "arena")
store = Store.open([sys.argv[1]], b"n" * 32, [4096], quota_bytes=4 << 20, floor_bytes=1 << 60)
while store.stats()["floor_refusals"] < 2:
    store.put(["0" * 64], None, memory, np.zeros(1, dtype=np.int64))
    store.sync()
"""


def test_store_when_its_file_system_is_to_stay_freer_than_it_is_then_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GROW_IN_VAIN, str(tmp_path / "store")]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert ran.stderr.count("the store does not grow") == 1, ran.stderr


def test_namespace_when_invalidated_then_nothing_is_found(store: Store, memory: SharedBytes) -> None:
    store.put(keys(1), None, memory, offsets(0))
    store.sync()
    store.invalidate(b"m" * 32)
    assert store.lookup(keys(1)).num_pages == 0
    store.invalidate(NAMESPACE)
    assert store.lookup(keys(1)).num_pages == 1


def test_check_when_a_record_is_damaged_then_found_and_repaired(tmp_path: Path, memory: SharedBytes) -> None:
    path = tmp_path / "store"
    store = open_store(path)
    store.put(keys(1, 2), None, memory, offsets(0, 1))
    store.sync()
    store.close()
    assert store_check([str(path)])["findings"] == []
    (segment,) = path.glob("shelf-*/segment-*")
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + FRAME_BYTES + 4096 + 50)
        file.write(b"\xff" * 8)
    (finding,) = store_check([str(path)])["findings"]
    assert (finding["place"], finding["problem"], finding["is_repaired"]) == (1, "layer 0 does not verify", False)
    assert store_repair([str(path)])["findings"][0]["is_repaired"]
    assert store_check([str(path)])["findings"] == []
    survey = store_survey([str(path)])
    assert (survey["num_records"], survey["shelves"][0]["is_in_use"]) == (1, False)
    assert open_store(path).lookup(keys(1, 2)).num_pages == 1


def names(*numbers: int) -> list[int]:
    """As KV events name pages: by the first 64 bits of their keys."""
    return [int.from_bytes(bytes.fromhex(key(number))[:8], "big", signed=True) for number in numbers]


def test_moves_when_asked_for_then_what_came_and_went_since_and_what_was_before_is_listed(
    store: Store, memory: SharedBytes
) -> None:
    store.put(keys(1), None, memory, offsets(0))
    store.sync()
    assert store.moved(10) == ([], [])
    assert store.own_pages(0, 1000) == names(1)
    store.put(keys(2, 3), keys(1)[0], memory, offsets(1, 2))
    store.sync()
    first, rest = store.moved(1), store.moved(10)
    assert sorted(first[0] + rest[0]) == sorted(names(2, 3)) and first[1] == rest[1] == []
    assert store.evict(1) == 1
    assert store.moved(10) == ([], names(3)), "the last of the chain goes first"
    store.invalidate(b"m" * 32)
    assert [sorted(moved) for moved in store.moved(10)] == [[], sorted(names(1, 2))]
    assert store.own_pages(0, 1000) is None, "no place has anything"
    assert store.stats()["untold_moves"] == 0


def test_identity_when_a_store_is_opened_again_or_by_others_then_the_same_and_of_another_one_another(
    tmp_path: Path, store: Store, memory: SharedBytes
) -> None:
    store.put(keys(1), None, memory, offsets(0))
    store.sync()
    beside = open_store(tmp_path / "store")
    assert beside.identity == store.identity
    assert open_store(tmp_path / "other").identity != store.identity
    assert beside.moved(10) == ([], [])
    assert beside.lookup(keys(1)).num_pages == 1 and not beside.own_pages(0, 10), "another writer's"


def test_evict_when_pages_are_kept_then_all_others_go_before_them_and_they_too_where_nothing_else_is_left(
    store: Store, memory: SharedBytes
) -> None:
    store.keep(keys(1, 2))
    store.put(keys(1, 2, 3), None, memory, offsets(0, 1, 2))
    store.put(keys(4), None, memory, offsets(3))
    store.sync()
    assert store.evict(2) == 2
    assert (store.lookup(keys(1, 2)).num_pages, store.lookup(keys(4)).num_pages) == (2, 0)
    assert store.evict(1) == 1 and store.lookup(keys(1, 2)).num_pages == 1
    store.put(keys(5), None, memory, offsets(3))
    store.let_go(keys(1, 2))
    store.sync()
    assert store.evict(1) == 1 and store.lookup(keys(5)).num_pages == 1
