# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.features.stores.folder_bound import FolderBound, entries_of

PAGE_BYTES = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine pages of two namespaces, each used a second after the one before."""
    for number in range(9):
        path = tmp_path / ("ab" if number % 2 else "cd") / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * PAGE_BYTES)
        os.utime(path, (number, number))
    return tmp_path


def left(folder: Path) -> list[str]:
    return sorted(Path(entry.path).name for entry in entries_of(str(folder)))


def bound(folder: Path, pages: int, floor_bytes: int = 0) -> FolderBound:
    return FolderBound([folder], quota_bytes=pages * PAGE_BYTES, floor_bytes=floor_bytes)


def test_room_when_there_is_some_then_nothing_goes(folder: Path) -> None:
    assert bound(folder, 10).make_room(PAGE_BYTES) and len(left(folder)) == 9


def test_room_when_there_is_none_then_the_longest_unused_go_down_to_nine_tenths(folder: Path) -> None:
    made = bound(folder, 10)
    assert made.make_room(2 * PAGE_BYTES)
    assert left(folder) == list("2345678") and made.num_evicted == 2


def test_room_when_all_of_a_namespace_goes_then_its_folders_go_with_it(folder: Path) -> None:
    old = folder / "namespace" / "ef" / "old"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * PAGE_BYTES)
    os.utime(old, (0, 0))
    assert bound(folder, 10).make_room(PAGE_BYTES) and not (folder / "namespace").exists()
    assert sorted(found.name for found in folder.iterdir()) == ["ab", "cd"]


def test_room_when_a_clock_was_wrong_then_what_was_used_in_the_future_goes_first(folder: Path) -> None:
    future_s = time.time() + 1e7
    for number in (6, 8):
        os.utime(folder / "cd" / str(number), (future_s, future_s))
    assert bound(folder, 10).make_room(2 * PAGE_BYTES)
    assert left(folder) == list("0123457")


def test_room_when_others_have_written_meanwhile_then_they_are_counted(folder: Path) -> None:
    made = bound(folder, 10)
    (folder / "theirs").write_bytes(b"x" * 3 * PAGE_BYTES)
    # The ninth part of the quota is more than a sixty-fourth: it looks again.
    assert made.make_room(PAGE_BYTES)
    assert sum(entry.num_bytes for entry in entries_of(str(folder))) <= 9 * PAGE_BYTES


def test_room_when_more_is_wanted_than_may_ever_be_then_none_and_nothing_goes(folder: Path) -> None:
    assert not bound(folder, 10).make_room(10 * PAGE_BYTES) and len(left(folder)) == 9


def test_room_when_the_file_system_is_full_then_none(folder: Path) -> None:
    made = bound(folder, 10, floor_bytes=1 << 60)
    assert not made.make_room(PAGE_BYTES) and made.num_pauses == 1


def test_room_when_a_file_cannot_be_looked_at_and_another_not_be_removed_then_others_go_in_their_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "damaged").mkdir()
    stat, unlink, scandir = os.DirEntry.stat, os.unlink, os.scandir

    class Entry:
        """As the system's, of a drive that has lost the inode of file 1 and the folder ``damaged``."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.path, self.is_dir, self._entry = entry.path, entry.is_dir, entry

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            if self._entry.name == "1":
                raise OSError(errno.EUCLEAN, "structure needs cleaning")
            return stat(self._entry, follow_symlinks=follow_symlinks)

    def scanned(path: str) -> Iterator[Entry]:
        if path.endswith("damaged"):
            raise OSError(errno.EIO, "lost")
        return map(Entry, scandir(path))

    def removed(path: str) -> None:
        if stuck and Path(path).name in stuck:
            raise OSError(errno.EIO, "lost")
        unlink(path)

    stuck = {"0"}
    monkeypatch.setattr(os, "scandir", scanned)
    monkeypatch.setattr(os, "unlink", removed)
    made = bound(folder, 9)
    assert made.make_room(2 * PAGE_BYTES)
    assert left(folder) == list("045678") and made.num_evicted == 2
    stuck = set("045678")
    assert not made.make_room(4 * PAGE_BYTES), "nothing goes"


def test_entries_when_there_is_no_folder_then_none(tmp_path: Path) -> None:
    assert list(entries_of(str(tmp_path / "gone"))) == []
