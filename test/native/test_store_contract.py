# SPDX-License-Identifier: Apache-2.0
"""One contract for every backend of ``ports.PageStore``, each of them real: native files, the same on what is said to
be a mounted 3FS, NIXL's POSIX plugin, Mooncake with a master and a client that lends memory.

What a restart finds: of files, what was stored. Of Mooncake what lies in the memory of clients that went on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mooncake_cluster
import pytest
from processes import PYTHON_PATH
from store_rig import (
    FRAME_BYTES,
    NUM_FRAMES,
    QUOTA_BYTES,
    Place,
    fetch,
    filled,
    found,
    frame,
    key,
    keys,
    offsets,
    until,
)

from banyan._native import SharedBytes
from banyan.features.stores import MOONCAKE, NIXL_POSIX, nixl_files
from banyan.features.stores import mooncake as mooncake_values
from banyan.ports import PageStore
from banyan.store import backends
from banyan.store.backends import asked_store
from banyan.store.location import FILE, HF3FS
from benchmark.mooncake import Mooncake

pytestmark = pytest.mark.native
RIG = Path(__file__).with_name("store_rig.py")


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    cluster = mooncake_cluster.start(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Mooncake]:
    """One of the test's own, of which parts may die."""
    cluster = mooncake_cluster.start(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture(params=sorted((FILE, HF3FS, MOONCAKE, NIXL_POSIX)))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """3FS is a folder that is said to be mounted as one."""
    mounts, folder = tmp_path / "mounts", tmp_path / "store"
    mounts.write_text(f"hf3fs.cluster {tmp_path} fuse.hf3fs rw 0 0\n")
    monkeypatch.setattr(backends, "MOUNTS", mounts)
    # Mooncake's clients share one memory: a namespace for each test keeps them apart.
    place = Place(f"{request.param}://{folder / 'a'},{folder / 'b'}", folder, mounts, os.urandom(32))
    place.damage = place.flip
    if request.param == MOONCAKE:
        cluster = request.getfixturevalue("mooncake")
        place.url = cluster.url
        place.damage = lambda: damage_mooncake(cluster, place.namespace)
    return place


def damage_mooncake(cluster: Mooncake, namespace: bytes) -> None:
    """Change a byte of every value of the tests' pages, behind everybody's back."""
    client = mooncake_cluster.client(cluster)
    for number in range(NUM_FRAMES):
        name = f"{namespace.hex()}/{key(number)}"
        value = bytearray(client.get(name))
        if value:
            value[-100] ^= 1
            assert client.remove(name, True) == 0 and client.put(name, bytes(value)) == 0
    client.close()


@pytest.fixture
def store(place: Place) -> Iterator[PageStore]:
    store = place.open()
    yield store
    store.close()


@pytest.fixture
def memory() -> SharedBytes:
    return filled()


class Neighbour:
    """Another server's process on the same store, which has stored pages."""

    def __init__(self, place: Place, *numbers: int) -> None:
        command = [sys.executable, str(RIG), place.url, place.namespace.hex(), str(place.mounts), *map(str, numbers)]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert any(line == "stored\n" for line in self._process.stdout), "it has ended without storing"

    def die(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        self._process.communicate("")
        assert self._process.returncode == 0


@pytest.fixture
def neighbours(place: Place) -> Iterator[list[Neighbour]]:
    started: list[Neighbour] = []
    yield started
    for neighbour in started:
        neighbour.die()


def finds(store: PageStore, *numbers: int) -> bool:
    return found(store, keys(*numbers)).num_pages == len(numbers)


@pytest.mark.parametrize("layers_per_step", [1, 2])
def test_pages_when_stored_then_read_back_bit_for_bit(
    store: PageStore, memory: SharedBytes, layers_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in (mooncake_values, nixl_files):
        # These pages are so small that they would come whole.
        monkeypatch.setattr(library, "LEAST_BYTES", 0)
    assert store.put(keys(0, 1, 2), None, memory, offsets(0, 1, 2)) == ["queued"] * 3
    assert store.sync() == 0
    assert sorted(store.completed()) == sorted((name, "stored") for name in keys(0, 1, 2))
    assert store.completed() == []
    assert found(store, keys(0, 1, 9)).num_pages == 2
    assert fetch(store, memory, [0, 1, 2], 8, layers_per_step) == []
    for number in range(3):
        assert (frame(memory, number) == frame(memory, 8 + number)).all()


def test_pages_when_nobody_stored_them_then_not_found(store: PageStore) -> None:
    assert found(store, keys(100, 101)).num_pages == 0


def test_put_when_repeated_then_said_so(store: PageStore, memory: SharedBytes) -> None:
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    assert store.put(keys(0, 1), None, memory, offsets(0, 1)) == ["present", "queued"]
    assert store.sync() == 0
    assert found(store, keys(0, 1)).num_pages == 2


def test_writes_when_they_are_durable_then_their_bytes_and_their_time_are_counted(
    store: PageStore, memory: SharedBytes
) -> None:
    assert (store.stats()["written_bytes"], store.stats()["writing_us"]) == (0, 0)
    begun_s = time.monotonic()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    store.sync()
    took_us = (time.monotonic() - begun_s) * 1e6
    until(lambda: store.stats()["writing_us"] > 0)
    assert store.stats()["written_bytes"] >= 2 * FRAME_BYTES
    assert store.stats()["writing_us"] <= took_us + 50_000


def test_put_when_too_much_waits_then_the_rest_is_not_taken(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    answers: list[str] = []
    # 256 MiB may wait.
    while len(answers) * FRAME_BYTES < 300 << 20:
        numbers = range(len(answers), len(answers) + NUM_FRAMES)
        parent = key(len(answers) - 1) if answers and answers[-1] == "queued" else None
        answers += store.put(keys(*numbers), parent, memory, offsets(*range(NUM_FRAMES)))
    assert answers[0] == "queued" and "full" in answers and answers[-1] != "queued"
    assert store.stats()["backlog_pages"] * FRAME_BYTES <= 256 << 20
    store.close()
    assert len(store.completed()) == answers.count("queued"), "every frame comes back"


def test_writes_when_paused_then_none_until_sync(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    time.sleep(0.05)
    assert store.completed() == []
    assert store.sync() == 0
    assert len(store.completed()) == 2
    store.open_writes()


def test_pages_when_cleared_then_gone_though_another_writer_stands_behind_them_and_no_restart_finds_them(
    place: Place, memory: SharedBytes
) -> None:
    store, other = place.open(), place.open()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    store.sync()
    until(lambda: found(other, keys(0, 1)).num_pages == 2)
    assert other.put(keys(2), key(1), memory, offsets(2)) == ["queued"] and other.sync() == 0
    until(lambda: found(store, keys(0, 1, 2)).num_pages == 3)
    before = store.version
    assert store.clear() == 2
    assert found(store, keys(0, 1, 2)).num_pages == 0 and store.version != before
    other.clear()
    assert all(found(one, keys(number)).num_pages == 0 for one in (store, other) for number in range(3))
    store.close()
    other.close()
    again = place.open()
    assert all(found(again, keys(number)).num_pages == 0 for number in range(3))
    assert again.put(keys(0), None, memory, offsets(3)) == ["queued"] and again.sync() == 0
    assert fetch(again, memory, [0], 8) == [] and (frame(memory, 3) == frame(memory, 8)).all()
    again.close()


def test_queue_when_cleared_then_it_fails_and_nothing_of_it_is_stored(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    assert store.clear() == 0
    assert sorted(store.completed()) == sorted((name, "failed") for name in keys(0, 1)), "every frame comes back"
    store.open_writes()
    assert store.sync() == 0 and found(store, keys(0)).num_pages == 0


def test_namespace_when_invalidated_then_nothing_is_found(store: PageStore, memory: SharedBytes) -> None:
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    before = store.lookup(keys(0))
    store.invalidate(os.urandom(32))
    assert found(store, keys(0)).num_pages == 0
    assert store.read(before, 1, memory, offsets(5), layers_per_step=1).finish() == [(0, "gone")]


def test_namespace_when_it_is_another_then_its_pages_are_not_found(place: Place, memory: SharedBytes) -> None:
    one, other = place.open(), place.open(os.urandom(32))
    one.put(keys(0), None, memory, offsets(0))
    one.sync()
    time.sleep(0.1)
    assert found(other, keys(0)).num_pages == 0 and found(one, keys(0)).num_pages == 1
    one.close()
    other.close()


def test_close_when_repeated_then_harmless(store: PageStore, memory: SharedBytes) -> None:
    store.pause_writes()
    store.put(keys(0), None, memory, offsets(0))
    store.close()
    assert [name for name, _ in store.completed()] == keys(0), "every frame comes back"


def test_value_when_damaged_then_a_miss_and_written_anew(place: Place, memory: SharedBytes) -> None:
    first = place.open()
    first.put(keys(0, 1), None, memory, offsets(0, 1))
    first.sync()
    first.close()
    place.damage()
    again = place.open()
    failed = fetch(again, memory, [0, 1], 8)
    assert sorted(failed) == [(0, "checksum"), (1, "checksum")]
    assert again.stats()["checksum_failures"] == 2
    assert found(again, keys(0, 1)).num_pages == 0, "it is not expected again"
    until(lambda: again.put(keys(0, 1), None, memory, offsets(0, 1))[0] != "elsewhere")
    assert again.sync() == 0
    assert fetch(again, memory, [0, 1], 8) == []
    assert (frame(memory, 1) == frame(memory, 9)).all()
    again.close()


@pytest.mark.parametrize("place", [MOONCAKE, NIXL_POSIX], indirect=True)
def test_page_when_gone_since_it_was_found_then_it_fails_and_the_others_come(
    place: Place, store: PageStore, memory: SharedBytes
) -> None:
    # A native shelf's pages are its owner's alone to evict: the crate's own tests do that.
    other = place.open()
    store.put(keys(0), None, memory, offsets(0))
    store.sync()
    other.put(keys(1), key(0), memory, offsets(1))
    other.sync()
    pages = found(store, keys(0, 1))
    assert other.clear() == 1
    other.close()
    read = store.read(pages, 2, memory, offsets(8, 9), layers_per_step=1)
    assert [page for page, _ in read.finish()] == [1]
    assert (frame(memory, 0) == frame(memory, 8)).all()


def test_neighbours_when_on_one_store_then_each_finds_the_others_pages_and_outlives_it(
    place: Place, memory: SharedBytes, neighbours: list[Neighbour]
) -> None:
    store = place.open()
    neighbours += [Neighbour(place, 0, 1), Neighbour(place, 2, 3)]
    for number in (0, 2):
        until(partial(finds, store, number, number + 1))
    neighbours[0].die()
    assert store.put(keys(4), None, memory, offsets(4)) == ["queued"] and store.sync() == 0
    assert fetch(store, memory, [4], 10) == []
    assert fetch(store, memory, [2, 3], 8) == [], "the other one's"
    assert (frame(memory, 3) == frame(memory, 9)).all()
    assert fetch(store, memory, [0, 1], 11) == [], "those of the one that was killed"
    assert (frame(memory, 1) == frame(memory, 12)).all()
    store.close()


def test_store_when_its_process_was_started_again_then_what_was_stored_is_found(
    place: Place, memory: SharedBytes, neighbours: list[Neighbour]
) -> None:
    neighbours.append(Neighbour(place, 0, 1, 2))
    neighbours[0].leave()
    again = place.open()
    assert fetch(again, memory, [0, 1, 2], 8) == []
    for number in range(3):
        assert (frame(memory, number) == frame(memory, 8 + number)).all()
    assert again.stats() and again.engine
    again.close()


def test_store_when_more_is_written_than_it_may_hold_then_it_stays_within_and_goes_on(
    place: Place, memory: SharedBytes
) -> None:
    store = place.open()
    num_pages = 2 * QUOTA_BYTES // FRAME_BYTES
    for first in range(0, num_pages, NUM_FRAMES):
        numbers = range(first, first + NUM_FRAMES)
        store.put(keys(*numbers), key(first - 1) if first else None, memory, offsets(*range(NUM_FRAMES)))
        store.sync()
        assert not place.is_on_disk or place.held_bytes() <= QUOTA_BYTES
    fresh = str(uuid.uuid4().int)
    until(lambda: store.put(keys(int(fresh)), None, memory, offsets(0)) == ["present"] or store.sync() < 0)
    assert fetch(store, memory, [int(fresh)], 8) == []
    store.close()


def test_mooncake_when_the_lender_of_memory_dies_then_its_pages_are_misses_and_new_ones_go_elsewhere(
    cluster: Mooncake, tmp_path: Path, memory: SharedBytes
) -> None:
    store = Place(cluster.url, tmp_path, tmp_path, os.urandom(32)).open()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    assert store.sync() == 0
    pages = found(store, keys(0, 1))
    cluster.kill_lender()
    assert [page for page, _ in store.read(pages, 2, memory, offsets(8, 9), layers_per_step=1).finish()] == [0, 1]
    assert found(store, keys(0, 1)).num_pages == 0, "also while the master still names them"
    cluster.lender = cluster.lend(16 << 20)
    until(lambda: bool(store.put(keys(2), None, memory, offsets(2))) and store.sync() == 0)
    until(lambda: found(store, keys(2)).num_pages == 1)
    assert fetch(store, memory, [2], 8) == []
    store.close()


def test_mooncake_when_the_master_dies_then_nothing_is_found_and_nothing_waits(
    cluster: Mooncake, tmp_path: Path, memory: SharedBytes
) -> None:
    store = Place(cluster.url, tmp_path, tmp_path, os.urandom(32)).open()
    store.put(keys(0), None, memory, offsets(0))
    assert store.sync() == 0
    pages = store.lookup(keys(0))
    cluster.master.kill()
    cluster.master.wait()
    began_s = time.monotonic()
    assert asked_store(store).ask(keys(0)) is not None
    read = store.read(pages, 1, memory, offsets(8), layers_per_step=1)
    assert time.monotonic() - began_s < 2.5, "nobody waits for the master"
    # Its library tries for some seconds.
    assert [page for page, _ in read.finish()] == [0]
    until(lambda: asked_store(store).answers() == [(1, None)])
    assert store.lookup(keys(0)).num_pages == 0 and store.stats()["read_errors"] >= 1
    store.close()
