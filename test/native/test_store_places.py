# SPDX-License-Identifier: Apache-2.0
"""What a store meets on other people's machines: read-only mounts, files in DRAM, containers without io_uring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PYTHON_PATH
from store_rig import FRAME_BYTES, LAYER_BYTES, filled, keys, offsets

from banyan._native import Store

WORKER = Path(__file__).with_name("store_worker.py")

pytestmark = pytest.mark.native


def outcome(without: str, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(WORKER), without, str(path)],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kept_all(answer: dict[str, Any]) -> bool:
    return (answer["num_found"], answer["num_failed"], answer["num_same"]) == (8, 0, 8)


@pytest.fixture
def folder_in_dram() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="banyan-test-"))
    yield folder
    shutil.rmtree(folder)


def test_store_when_io_uring_is_forbidden_then_threads_do_it_and_say_so(tmp_path: Path) -> None:
    answer = outcome("io_uring", tmp_path / "store")
    assert answer["engine"].startswith("threads (no io_uring: Operation not permitted")
    assert kept_all(answer)


def test_store_when_its_files_are_in_dram_then_it_works_and_says_so(folder_in_dram: Path) -> None:
    answer = outcome("nothing", folder_in_dram / "store")
    assert answer["engine"].endswith("in DRAM: this file system is gone when the machine restarts")
    assert kept_all(answer)


def test_store_when_nothing_can_be_written_then_refused(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a read-only mount of one's own takes the right to make one")
    store = tmp_path / "store"
    assert kept_all(outcome("nothing", store))
    refusal = outcome("writes", store)["refused"]
    assert str(store) in refusal and "Read-only file system" in refusal


def test_pages_when_one_drive_of_two_cannot_be_written_then_said_once_counted_and_the_other_takes_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("good", "bad")]

    def opened() -> Store:
        return Store.open(
            paths, b"n" * 32, list(LAYER_BYTES), quota_bytes=8 << 20, floor_bytes=0, segment_bytes=FRAME_BYTES + 8192
        )

    memory, store = filled(), opened()
    store.put(keys(0, 1), None, memory, offsets(0, 1))
    assert store.sync() == 0 and store.clear() == 2
    store.close()
    store = opened()
    (segment,) = (tmp_path / "bad").glob("shelf-*/segment-*")
    segment.unlink()
    segment.mkdir()
    for number in range(2, 6):
        store.put(keys(number), None, memory, offsets(number))
        store.sync()
    stats = store.stats()
    assert stats["written_pages"] > 0 and stats["write_errors"] == stats["write_failures"] > 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"banyan: {segment} cannot be written: ")
    store.close()
