# SPDX-License-Identifier: Apache-2.0
"""Folders and files that somebody else has put in the way are refused, and nothing behind them is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from banyan import owner
from banyan.owner import claim_folder, open_own

FLAG = "--some-flag"


def test_folder_when_absent_then_made_private(tmp_path: Path) -> None:
    claim_folder(tmp_path / "a" / "b", FLAG)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_folder_when_others_may_write_it_then_refused_with_the_flag_and_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "something").touch()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=f"{FLAG}.*others may write it.*chmod go-w"):
        claim_folder(folder, FLAG)
    folder.chmod(0o755)
    claim_folder(folder, FLAG)


def test_folder_when_it_belongs_to_another_user_then_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    if user == 0:
        os.chown(tmp_path, 65534, -1)
        user, owner = 0, 65534
    else:
        owner = user
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        user += 1
    with pytest.raises(ValueError, match=f"belongs to user {owner}.*runs as user {user}.*chown"):
        claim_folder(tmp_path, FLAG)


def test_folder_when_it_looks_like_a_mount_point_without_its_mount_then_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "nvme0"
    mount.mkdir()
    mount.chmod(0o755)
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# what is mounted at start\n\nUUID=1 / ext4 defaults 0 1\nUUID=2 {mount} xfs noauto 0 2\n")
    monkeypatch.setattr(owner, "FSTAB", fstab)
    real = os.stat
    # Wherever the tests run: as if all of it were the root file system's.
    monkeypatch.setattr(os, "stat", lambda path, **how: real(mount if path == "/" else path, **how))
    for folder in (mount, mount / "kv", mount / "deep" / "kv"):
        with pytest.raises(ValueError, match=f"{FLAG}.*not mounted.*mkdir -p {folder}"):
            claim_folder(folder, FLAG)
    assert list(mount.iterdir()) == []
    mount.chmod(0o700)
    claim_folder(mount / "kv", FLAG)


def test_folder_when_it_is_empty_and_no_drive_is_mounted_there_then_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "kv"
    made.mkdir()
    made.chmod(0o755)
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: real(made if path == "/" else path, **how))
    claim_folder(made, FLAG)
    monkeypatch.setattr(owner, "MOUNT_PARENTS", {tmp_path})
    with pytest.raises(ValueError, match="not mounted"):
        claim_folder(made, FLAG)


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "writable by others"])
def test_file_when_it_is_no_file_of_its_own_then_refused_and_nobody_waits(tmp_path: Path, kind: str) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"precious")
    match kind:
        case "link":
            path.symlink_to(other)
        case "hard link":
            path.hardlink_to(other)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.write_bytes(b"x")
            path.chmod(0o666)
    with pytest.raises(OSError, match=str(path)):
        open_own(path, os.O_RDWR)
    assert other.read_bytes() == b"precious"


def test_file_when_it_is_ours_then_open_and_reads_wait_for_the_drive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    fd = open_own(path, os.O_RDONLY)
    assert os.read(fd, 9) == b"content" and os.get_blocking(fd)
    os.close(fd)
