# SPDX-License-Identifier: Apache-2.0
"""One folder that several nodes have mounted, over mounts whose locks do not meet (FUSE, as 3FS's client may be)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_on_mount import NUM_PAGES
from processes import Process
from store_rig import LAYER_BYTES, SPACE, until

from banyan._native import Store, store_remove_idle, store_survey

HERE = Path(__file__).parent
SILENCE_S = 301
SIGN_S = 20

pytestmark = pytest.mark.native

Node = Callable[[int], Process]


def can_mount() -> bool:
    is_root = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    return is_root and os.access("/dev/fuse", os.R_OK | os.W_OK)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[tuple[Path, subprocess.Popen[str]]]]:
    """Three mounts of ``tmp_path / "folder"``, each with the process that serves it."""
    if not can_mount():
        pytest.skip("needs the right to mount, and FUSE")
    (tmp_path / "folder").mkdir(mode=0o700)
    served: list[tuple[Path, subprocess.Popen[str]]] = []
    try:
        for number in range(3):
            point = tmp_path / f"node-{number}"
            point.mkdir()
            words = [sys.executable, HERE / "shared_mount.py", tmp_path / "folder", point]
            one = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            served.append((point, one))
            assert one.stdout is not None and one.stdout.readline() == "mounted\n"
        yield served
    finally:
        for point, one in served:
            subprocess.run(["umount", "--lazy", point], check=True)
            one.kill()
            one.communicate()


@pytest.fixture
def mounts(servers: list[tuple[Path, subprocess.Popen[str]]]) -> list[Path]:
    return [point for point, _ in servers]


@pytest.fixture
def node(tmp_path: Path, mounts: list[Path]) -> Iterator[Node]:
    """``node(number)``: a process of the node with this number."""
    started = []

    def start(number: int) -> Process:
        boot = tmp_path / f"boot-{number}"
        boot.write_text(f"{number:08x}-0000-0000-0000-000000000000\n")
        process = Process(HERE / "node_on_mount.py", mounts[number] / "kv", boot)
        started.append(process)
        process.expect("opened")
        return process

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


def asked(process: Process, line: str, word: str) -> list[str]:
    process.tell(line)
    return process.expect(word)


def stat(process: Process, name: str) -> int:
    return int(asked(process, name, name)[0])


def pages(first: int, count: int = NUM_PAGES) -> str:
    return " ".join(str(number) for number in range(first, first + count))


def be_silent(folder: Path, number: int) -> None:
    """As if this node had given no sign for ``SILENCE_S``."""
    (mark,) = (mark for mark in folder.glob("kv/shelf-*/writer-*") if mark.read_text().startswith(f"{number:08x}"))
    os.utime(mark, times=(time.time() - SILENCE_S,) * 2)


def test_locks_when_taken_on_two_mounts_then_they_do_not_meet(mounts: list[Path]) -> None:
    """What all of this is about."""
    (mounts[0] / "lock").touch()
    with (mounts[0] / "lock").open("w") as one, (mounts[1] / "lock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nodes_when_one_is_killed_as_it_writes_then_others_find_all_and_have_its_shelf_when_it_was_silent(
    tmp_path: Path, node: Node
) -> None:
    first, second = node(0), node(1)
    assert asked(first, f"keep {pages(0, 4)}", "kept") == ["4"]
    # Nobody has told the second, which has written nothing.
    until(lambda: asked(second, f"find {pages(0)}", "found") == ["4"])
    assert asked(second, f"keep {pages(10, 2)}", "kept") == ["2"]
    assert asked(second, "survey", "survey") == ["1", "1"]
    assert asked(second, "evict", "evicted") == []
    assert asked(first, f"put {pages(0)}", "put") == ["present"] * 4 + ["queued"] * 4
    first.kill()

    num_found, num_same, num_failed = map(int, asked(second, f"fetch {pages(0)}", "fetched"))
    assert 4 <= num_found == num_same and num_failed == 0
    third = node(2)
    assert stat(third, "adopted_pages") == 0
    assert asked(third, "evict", "evicted") == [] and asked(third, "survey", "survey") == ["1"] * 3
    num_found, num_same, num_failed = map(int, asked(third, f"fetch {pages(0)}", "fetched"))
    assert 4 <= num_found == num_same and num_failed == 0

    be_silent(tmp_path / "folder", 0)
    assert sorted(asked(second, "survey", "survey")) == ["0", "1", "1"]
    heir = node(2)
    assert stat(heir, "adopted_pages") == num_found
    assert asked(heir, f"fetch {pages(0)}", "fetched") == [str(num_found), str(num_found), "0"]
    assert asked(heir, f"fetch {pages(10, 2)}", "fetched") == ["2", "2", "0"]


def test_server_when_it_was_killed_and_starts_again_on_its_node_then_it_has_its_shelf_at_once(node: Node) -> None:
    first = node(0)
    assert asked(first, f"keep {pages(0)}", "kept") == [str(NUM_PAGES)]
    first.kill()
    assert stat(node(1), "adopted_pages") == 0
    assert stat(node(0), "adopted_pages") == NUM_PAGES


def test_node_when_it_comes_back_and_another_has_its_shelf_then_it_writes_no_more(tmp_path: Path, node: Node) -> None:
    silent = node(0)
    assert asked(silent, f"keep {pages(0)}", "kept") == [str(NUM_PAGES)]
    silent.popen.send_signal(signal.SIGSTOP)
    be_silent(tmp_path / "folder", 0)
    heir = node(1)
    assert stat(heir, "adopted_pages") == NUM_PAGES
    silent.popen.send_signal(signal.SIGCONT)
    # It could have known by its own clock, had it really been silent for so long.
    until(lambda: stat(silent, "is_stopped") == 1, timeout_s=2 * SIGN_S)
    assert asked(silent, f"put {pages(20)}", "put")[0] == "full"
    assert asked(heir, f"keep {pages(30)}", "kept") == [str(NUM_PAGES)]
    for first in (0, 30):
        assert asked(heir, f"fetch {pages(first)}", "fetched") == [str(NUM_PAGES), str(NUM_PAGES), "0"]


def test_mount_when_it_hangs_as_another_name_is_looked_for_then_nobody_waits_for_ever(
    servers: list[tuple[Path, subprocess.Popen[str]]],
) -> None:
    point, server = servers[0]
    store = Store.open(
        [str(point / "kv")], b"n" * 32, LAYER_BYTES, quota_bytes=SPACE.quota_bytes, floor_bytes=0, stall_s=0.2
    )
    server.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match="what other writers"):
            store.beside(b"o" * 32, LAYER_BYTES, 1)
    finally:
        server.send_signal(signal.SIGCONT)
    store.close()


def test_folder_when_one_node_has_it_on_its_drive_and_exports_it_then_neither_takes_the_others_shelf(
    tmp_path: Path, node: Node
) -> None:
    home = [str(tmp_path / "folder" / "kv")]
    store, other = (
        Store.open(home, b"n" * 32, LAYER_BYTES, quota_bytes=SPACE.quota_bytes, floor_bytes=0) for _ in range(2)
    )
    for lock in (tmp_path / "folder").glob("kv/shelf-*/lock"):
        os.utime(lock, times=(time.time() - SILENCE_S,) * 2)
    guest = node(0)
    assert asked(guest, "survey", "survey") == ["1"] * 3 and asked(guest, "evict", "evicted") == []
    assert asked(guest, f"keep {pages(0)}", "kept") == [str(NUM_PAGES)]
    other.close()
    assert sum(shelf["is_in_use"] for shelf in store_survey(home)["shelves"]) == 2
    assert len(store_remove_idle(home)[0]) == 1
    again = Store.open(home, b"n" * 32, LAYER_BYTES, quota_bytes=SPACE.quota_bytes, floor_bytes=0)
    assert again.stats()["adopted_pages"] == 0
    again.close()
    store.close()
