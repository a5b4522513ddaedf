# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from banyan._native import SharedBytes, Store
from banyan.cli import main

FRAME_BYTES = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with three pages, closed."""
    path = tmp_path / "store"
    store = Store.open([str(path)], b"n" * 32, [FRAME_BYTES], quota_bytes=4 << 20, floor_bytes=0)
    memory = SharedBytes.create(3 * FRAME_BYTES, "arena")
    store.put([c * 64 for c in "abc"], None, memory, np.arange(3, dtype=np.int64) * FRAME_BYTES)
    assert store.sync() == 0
    store.close()
    return path


def run(capsys, *command: object) -> tuple[int, dict]:
    status = main([*map(str, command), "--json"])
    return status, json.loads(capsys.readouterr().out)


def damage(path: Path) -> None:
    (segment,) = path.glob("shelf-*/segment-*")
    with segment.open("r+b") as file:
        file.seek(4096 + 4096 + 17)
        file.write(b"\xff\x00\xff")


def test_fsck_when_all_is_well_then_clean(path: Path, capsys) -> None:
    status, report = run(capsys, "fsck", path)
    assert (status, report["is_clean"], report["num_records"], report["num_orphans"]) == (0, True, 3, 0)


def test_fsck_when_a_record_is_bad_then_found_repaired_and_clean(path: Path, capsys) -> None:
    damage(path)
    status, report = run(capsys, "fsck", path)
    assert (status, len(report["findings"])) == (4, 1)
    assert run(capsys, "fsck", path, "--repair")[0] == 1
    status, report = run(capsys, "fsck", path)
    # Its children stay, and cannot be found until it is stored again.
    assert (status, report["num_records"], report["num_orphans"]) == (0, 2, 1)


def test_fsck_when_the_directory_is_no_store_then_one_line_and_status_8(tmp_path: Path, capsys) -> None:
    status, report = run(capsys, "fsck", tmp_path)
    assert status == 8
    assert str(tmp_path) in report["error"]
    assert main(["fsck", str(tmp_path)]) == 8
    assert capsys.readouterr().out.count("\n") == 1


def test_store_when_listed_then_shelves_and_totals(path: Path, capsys) -> None:
    (shelf,) = run(capsys, "store", "ls", path)[1]["shelves"]
    assert (shelf["num_records"], shelf["is_in_use"]) == (3, False)
    totals = run(capsys, "store", "stat", path)[1]
    assert (totals["num_records"], totals["num_shelves"], totals["num_namespaces"]) == (3, 1, 1)
    assert main(["store", "ls", str(path)]) == 0
    assert "3 of" in capsys.readouterr().out


def test_store_when_a_shelf_cannot_be_read_then_the_status_says_that_there_is_more(path: Path, capsys) -> None:
    (manifest,) = path.glob("**/manifest*")
    manifest.unlink()
    manifest.mkdir()
    status, totals = run(capsys, "store", "stat", path)
    assert (status, totals["num_records"], totals["num_unreadable_shelves"]) == (4, 0, 1)
    assert run(capsys, "store", "ls", path)[0] == 4


def test_evict_when_a_shelf_is_in_use_then_it_stays(path: Path, capsys) -> None:
    shelf = run(capsys, "store", "ls", path)[1]["shelves"][0]["shelf"]
    store = Store.open([str(path)], b"n" * 32, [FRAME_BYTES], quota_bytes=4 << 20, floor_bytes=0)
    status, answer = run(capsys, "store", "evict", path, "--shelf", shelf)
    assert status == 8 and "in use" in answer["error"]
    store.close()
    named = run(capsys, "store", "evict", path, "--shelf", shelf.lstrip("0").upper())
    assert named == (0, {"removed_shelves": [shelf], "num_unremoved_shelves": 0})
    assert run(capsys, "store", "evict", path)[1] == {"removed_shelves": [], "num_unremoved_shelves": 0}
    assert run(capsys, "store", "stat", path)[1]["num_records"] == 0


def test_evict_when_a_shelf_cannot_be_removed_then_counted_and_the_status_says_so(path: Path, capsys) -> None:
    (shelf,) = path.glob("**/shelf-*")
    (shelf / "in the way").mkdir()
    status, answer = run(capsys, "store", "evict", path)
    assert (status, answer) == (4, {"removed_shelves": [], "num_unremoved_shelves": 1})


@pytest.mark.parametrize("command", [("fsck",), ("store", "ls"), ("store", "evict")])
@pytest.mark.parametrize("url", ["mooncake://127.0.0.1:1", "nixl+posix:///kv"])
def test_store_when_it_has_no_shelves_then_one_line_says_which_commands_there_are(command, url, capsys) -> None:
    status, report = run(capsys, *command, url)
    assert status == 8
    assert "`banyan store` and `banyan fsck` are for file:// and 3fs://" in report["error"]


def test_stat_when_the_store_is_a_folder_of_values_then_counted(tmp_path: Path, capsys) -> None:
    assert run(capsys, "store", "stat", f"nixl+posix://{tmp_path}")[0] == 8, "there is none"
    for key in ("aa1", "ab2"):
        path = tmp_path / "banyan-values-1" / ("n" * 64) / key[:2] / key
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
    status, report = run(capsys, "store", "stat", f"nixl+posix://{tmp_path}")
    assert (status, report) == (0, {"num_records": 2, "used_bytes": 200, "num_namespaces": 1})
